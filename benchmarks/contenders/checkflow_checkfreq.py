"""CheckFreq's rule as a schedule that checkflow's runtime and store carry out: what is gained by the plan alone."""

from __future__ import annotations

from pathlib import Path

from contenders.checkflow import Checkflow, compile_for


class CheckflowCheckfreq(Checkflow):
    what = "as checkflow, with the schedule of `checkflow compile --policy checkfreq`"

    @classmethod
    def prepare(cls, workload: str, folder: Path) -> None:
        compile_for(workload, folder, policy="checkfreq")
