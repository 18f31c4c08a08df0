"""checkflow: attach, restore, step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import torch

import checkflow
from checkflow.store.trainer.persist_every import PersistEvery
from contenders import Contender, Job, Tier

SCHEDULE = "schedule.json"
NEVER = 10**9
REFUSED_S = 5.0  # a disk that is full stays so here: ten minutes of patience with it would all be waited for


def silent(_message: str) -> None:
    """Waits for a former saver are part of what is measured."""


class Checkflow(Contender):
    what = (
        'attach(when_full="wait", slots=2), every checkpoint persisted on disk; in memory its own slots, none persisted'
    )
    durable = True
    verifies = True
    prepares = True
    in_files = False
    slots: ClassVar[int] = 2

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        super().__init__(job, training)
        self.called_s = 0.0  # of hooks_s, in calls that the driver times itself
        self._saved = 0
        self.ckpt = checkflow.attach(
            training.model,
            training.optimizer,
            schedule=job.prepared / SCHEDULE,
            store=job.folder,
            interval=job.interval,
            slots=self.slots,
            when_full="wait",
            persist_every=PersistEvery(iterations=job.interval if job.tier is Tier.DISK else NEVER),
            notify=silent,
            retry_s=REFUSED_S,
        )

    @classmethod
    def version(cls) -> str:
        from importlib.metadata import version

        return f"checkflow {version('checkflow')}"

    @classmethod
    def preload(cls) -> None:
        import checkflow.checkpointing.attach  # noqa: F401

    @classmethod
    def prepare(cls, workload: str, folder: Path) -> None:
        compile_for(workload, folder, policy="checkflow")

    def after_iteration(self, iteration: int) -> None:
        began = time.perf_counter()
        self.ckpt.step()
        self.called_s += time.perf_counter() - began
        if self.job.due(iteration):
            self._saved = iteration

    def wait(self) -> None:
        """In memory what is missing is staged at the next iteration's anchors."""
        status = self.ckpt.status()
        if self.job.tier is Tier.DISK and self._saved > (status.durable_iteration or 0):
            self.ckpt.save(keep=False)

    def close(self) -> None:
        self.ckpt.close()

    def hidden_s(self) -> float:
        return self.hooks_s() - self.called_s

    def hooks_s(self) -> float:
        """In hooks and step() so far."""
        return self.ckpt.stats().hook_ns / 1e9

    def restore(self) -> int:
        return self.ckpt.restore()


def compile_for(workload: str, folder: Path, *, policy: str) -> None:
    """Write a policy's schedule of the workload, at every iteration or the smallest interval that the link allows."""
    from peering.workloads import WORKLOADS

    from checkflow import hardware  # the compiler is none of a training's imports
    from checkflow.compiler import Compiled, Options, compile_graph
    from checkflow.hardware.measure import measure_profile
    from checkflow.schedule import write_schedule
    from checkflow.trace import trace_training

    device = WORKLOADS[workload].device
    with torch.device(device):
        graph = trace_training(WORKLOADS[workload].build, model=workload, measure=True).graph
    bandwidth = hardware.link_bytes_per_s(measure_profile("here", device))
    compiled = compile_graph(graph, Options(bandwidth, policy=policy))
    if not isinstance(compiled, Compiled):
        compiled = compile_graph(graph, Options(bandwidth, interval=None, policy=policy))
    assert isinstance(compiled, Compiled), f"{workload}: the link is too slow at any interval"
    write_schedule(folder / SCHEDULE, compiled.schedule)
