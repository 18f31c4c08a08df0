"""Peak memory of one network at one batch size under each scheme, as a table. bars.py draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from checkflow.sweep import Row
from evaluation.table import Table

HEADINGS = (
    "network / batch", "a checkpoint every", "state MiB", "training alone MiB", "+CheckFreq", "+paper's optimum",
    "+ours as executed", "saved of CheckFreq's peak", "saved, its copy held",
)  # fmt: skip
SUMMARY_HEADINGS = (
    "no added byte, batch 1", "no added byte, batch 32", "saved of CheckFreq's peak, mean at batch 32", "least to most",
    "saved, its copy held, mean at batch 32", "least to most",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peaks:
    """What training needs at its peak without checkpoints, and under each scheme, all at one interval."""

    network: str
    batch: int
    interval: int
    state_bytes: int
    training_bytes: int
    checkfreq_bytes: int  # its copy is freed as soon as it has left
    paper_bytes: int | None  # the paper's optimum as planned; None: not asked for
    executed_bytes: int  # ours

    @property
    def saving(self) -> float:
        """Of CheckFreq's peak, a fraction."""
        return 1 - self.executed_bytes / self.checkfreq_bytes

    @property
    def held_bytes(self) -> int:
        """CheckFreq's peak if its copy of the whole state is still there when training is at its own."""
        return self.training_bytes + self.state_bytes

    @property
    def held_saving(self) -> float:
        """Of that peak, a fraction."""
        return 1 - self.executed_bytes / self.held_bytes

    @property
    def unadded(self) -> bool:
        """Whether ours needs not one byte more than training alone."""
        return self.executed_bytes == self.training_bytes


def peaks_of(ours: Iterable[Row], paper: Iterable[Row] = ()) -> tuple[Peaks, ...]:
    """From rows of formulation direct, each with that of formulation compact for the same cell, where there is one.

    Raises ValueError for a row that is not feasible, or where the two have different intervals.
    """
    optimum = {row.cell.model: row for row in paper}
    return tuple(_peaks(row, optimum.get(row.cell.model)) for row in ours)


def name_of(row: Row) -> tuple[str, int]:
    """(network, batch) of a row whose graph file is NETWORK-BATCH.json."""
    network, _, batch = Path(row.cell.model).stem.rpartition("-")
    return network, int(batch)


def of_batch(peaks: Sequence[Peaks], batch: int) -> tuple[Peaks, ...]:
    """Those at one batch size."""
    return tuple(each for each in peaks if each.batch == batch)


def table(peaks: Sequence[Peaks]) -> Table:
    """A line for each; "+" is above training alone."""
    return Table(HEADINGS, tuple(map(_line, peaks)), left=2)


def summary(peaks: Sequence[Peaks]) -> tuple[str, ...]:
    """All of them in one line, for a table with SUMMARY_HEADINGS."""
    savings, held = [each.saving for each in peaks], [each.held_saving for each in peaks]
    small, large = of_batch(peaks, 1), of_batch(peaks, 32)
    return (
        f"{sum(each.unadded for each in small)} of {len(small)}",
        f"{sum(each.unadded for each in large)} of {len(large)}",
        f"{fmean(each.saving for each in large):.1%}",
        f"{min(savings):.0%} to {max(savings):.0%}",
        f"{fmean(each.held_saving for each in large):.1%}",
        f"{min(held):.0%} to {max(held):.0%}",
    )


def mib(size_bytes: int) -> str:
    """Without its unit; 0 is no byte at all."""
    return f"{size_bytes / 2**20:.1f}" if size_bytes else "0"


def _peaks(row: Row, paper: Row | None) -> Peaks:
    network, batch = name_of(row)
    known = row.interval, row.state_bytes, row.training_peak_bytes, row.checkfreq_peak_bytes, row.peak_bytes
    interval, state, training, checkfreq, executed = known
    if interval is None or not (state and training and checkfreq and executed):
        raise ValueError(f"{row.cell.model}: has no peaks ({row.message})")
    if paper is not None and paper.interval != interval:
        raise ValueError(f"{row.cell.model}: the paper's optimum is of interval {paper.interval}, ours of {interval}")
    optimum = None if paper is None else paper.packed_peak_bytes
    return Peaks(network, batch, interval, state, training, checkfreq, optimum, executed)


def _line(each: Peaks) -> tuple[str, ...]:
    return (
        f"{each.network} / {each.batch}",
        "iteration" if each.interval == 1 else f"{each.interval} iterations",
        mib(each.state_bytes),
        mib(each.training_bytes),
        mib(each.checkfreq_bytes - each.training_bytes),
        "" if each.paper_bytes is None else mib(each.paper_bytes - each.training_bytes),
        mib(each.executed_bytes - each.training_bytes),
        f"{each.saving:.1%}",
        f"{each.held_saving:.1%}",
    )
