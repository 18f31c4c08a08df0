"""A run: which cell is measured when, and where each contender keeps its files meanwhile."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import contenders
import torch
from contenders import Job, Tier

from . import faults, kills, pairs, restores
from .orders import Attach, Detach, Done, Prepare, Train, Turn
from .processes import Process, ToolError, worker
from .results import Fault, Kills, Overhead, Report, Restore, Save, Tool
from .workloads import WORKLOADS

NONE = "none"
MEMORY = Path("/dev/shm")
SAVES = 3
PIECE = 10


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a workload is measured: interval -> (iterations in a turn, pairs); what is reported beyond is spread."""

    measured: dict[int, tuple[int, int]]
    baseline: int  # iterations of none between two turns
    warm: int  # iterations before the first turn, at most three saves
    reported: tuple[int, ...]
    durable_only: bool = False  # leave out what is not durable on disk
    processes: int = 1  # of each contender, one after the other, with so many pairs each
    repeats: int = 3  # of each restore; an odd number has a median


class Driver:
    """Holds the run's folders and collects figures."""

    def __init__(
        self, names: tuple[str, ...], directory: Path, sizes: dict[str, Sizes], log: Callable[[str], None]
    ) -> None:
        self.skipped: dict[str, str] = {}
        self._names = names
        self._sizes = sizes
        self._log = log
        self._stack = contextlib.ExitStack()
        self._disk = self._folder(directory)
        self._memory = self._folder(MEMORY if os.access(MEMORY, os.W_OK) else None)
        self._began = time.monotonic()
        self._load = os.getloadavg()[0]
        self._missing = {name: contenders.load(name).missing() for name in names}
        self._overheads: list[Overhead] = []
        self._saves: list[Save] = []
        self._restores: list[Restore] = []
        self._kills: list[Kills] = []
        self._faults: list[Fault] = []
        self._broken: dict[str, str] = {}
        self._prepared_s: dict[str, dict[str, float]] = {name: {} for name in names}

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def overheads(self, workload: str, tiers: tuple[Tier, ...]) -> None:
        sizes = self._sizes[workload]
        with worker(workload, NONE, self._disk / "none.log") as none, self._job(NONE, workload, Tier.DISK, 1) as job:
            none.ask(Attach(job), Done)
            none.ask(Train(3), Turn)
            none.freeze()
            for name, tier in self._cells(tiers):
                if sizes.durable_only and name != NONE and not contenders.load(name).durable:
                    continue
                with self._trying(name, f"{workload}, {tier}"):
                    self._overhead(none, name, workload, tier, sizes)

    def _overhead(self, none: Process, name: str, workload: str, tier: Tier, sizes: Sizes) -> None:
        samples: dict[int, list[pairs.Samples]] = {interval: [] for interval in sizes.measured}
        plans = {
            interval: pairs.Plan(turn, PIECE, sizes.baseline, count, min(sizes.warm, pairs.WARM_SAVES * interval))
            for interval, (turn, count) in sizes.measured.items()
        }
        in_files = tier is Tier.MEMORY and contenders.load(name).in_files
        found: list[Overhead] = []
        for process in range(sizes.processes):
            with worker(workload, name, self._disk / f"{name}.log") as tool:
                for interval, plan in plans.items():
                    with self._job(name, workload, tier, interval) as job:
                        samples[interval].append(pairs.measure(none, tool, job, plan, in_files))
                        tool.thaw()
                        tool.ask(Detach(), Done)
                    if process == sizes.processes - 1:
                        measured = pairs.overhead(job, name, plan, samples[interval])
                        self._log(f"{workload}, {name}, {tier}, every {interval}: {measured.loss:+.1%} throughput lost")
                        found.append(measured)
        sparse = found[-1]
        self._overheads += [each for each in found if each.interval in sizes.reported]
        measured_intervals = {each.interval for each in found}
        self._overheads += [pairs.spread(sparse, each) for each in sizes.reported if each not in measured_intervals]

    def saves(self, workload: str, tiers: tuple[Tier, ...]) -> None:
        for name, tier in self._cells(tiers, NONE):
            if tier is Tier.MEMORY and not contenders.load(name).in_files:
                continue  # staged by the next iteration's anchors: there is no moment to wait for
            with (
                self._trying(name, f"{workload}, save, {tier}"),
                self._job(name, workload, tier, 1) as job,
                worker(workload, name, self._disk / f"{name}.log") as tool,
            ):
                self._saves.append(pairs.save_alone(tool, job, name, SAVES))

    def restores(self, workload: str) -> None:
        """In turns: each case of each contender, then all of them again."""
        sizes = self._sizes[workload]
        with contextlib.ExitStack() as folders:
            candidates: list[restores.Candidate] = []
            for name in self._running(NONE):
                if sizes.durable_only and not contenders.load(name).durable:
                    continue
                with self._trying(name, f"{workload}, save"):
                    job = folders.enter_context(self._job(name, workload, Tier.DISK, 1))
                    candidates.append(restores.Candidate(name, job, self._disk / f"{name}.log"))
            kept = restores.Kept(max([restores.KEPT_BYTES, *(restores.KEPT * each.state_bytes for each in candidates)]))
            going = candidates
            for case in restores.cases(sizes.repeats):
                able: list[restores.Candidate] = []
                for candidate in going:
                    with self._trying(candidate.contender, f"{workload}, restore, {case}"):
                        candidate.restore(case, kept)
                        able.append(candidate)
                going = able
            kept.give()
        self._restores += [figures for candidate in candidates for figures in candidate.figures()]

    def kills(self, workload: str, tiers: tuple[Tier, ...], count: int) -> None:
        for name, tier in self._cells(tiers, NONE):
            with self._trying(name, f"{workload}, kills, {tier}"), self._job(name, workload, tier, 1) as job:
                self._kills.append(kills.measure(name, job, self._disk / f"{name}.log", count))

    def faults(self) -> None:
        for name in self._running(NONE):
            with self._trying(name, "flipped bit"), self._job(name, "tiny", Tier.DISK, 1) as job:
                self._faults.append(faults.flipped_bit(name, job, self._disk / f"{name}.log"))
            with self._trying(name, "failed write"), self._job(name, "conv", Tier.DISK, 1) as job:
                self._faults.append(faults.failed_write(name, job, self._disk / f"{name}.log"))

    def report(self, machine: str, command: str) -> Report:
        tools = []
        for name in self._names:
            kind = contenders.load(name)
            missing = self._missing[name] or self._broken.get(name)
            version = "" if self._missing[name] else kind.version()
            prepared_s = self._prepared_s[name]
            tools.append(Tool(name, kind.what, version, kind.durable, kind.verifies, missing, prepared_s))
        return Report(
            machine=machine,
            date=datetime.date.today().isoformat(),
            command=command,
            seconds=time.monotonic() - self._began,
            load=self._load,
            versions={"torch": torch.__version__},
            tools=tuple(tools),
            workloads={name: WORKLOADS[name].what for name in self._sizes if name not in self.skipped},
            skipped=self.skipped,
            overheads=self._overheads,
            saves=self._saves,
            restores=self._restores,
            kills=self._kills,
            faults=self._faults,
        )

    def _cells(self, tiers: tuple[Tier, ...], *left_out: str) -> Iterator[tuple[str, Tier]]:
        for name in self._running(*left_out):
            wanted = (Tier.DISK,) if name == NONE else tiers
            yield from ((name, tier) for tier in wanted if tier in contenders.load(name).tiers)

    def _running(self, *left_out: str) -> list[str]:
        return [name for name in self._names if not self._missing[name] and name not in left_out]

    @contextlib.contextmanager
    def _trying(self, name: str, what: str) -> Iterator[None]:
        """A tool that fails is told of, and the run goes on."""
        self._log(f"{what}: {name}")
        try:
            yield
        except ToolError as error:
            self._broken[name] = f"{what}: {error}"
            self._log(f"{what}: {name} failed: {error}")

    @contextlib.contextmanager
    def _job(self, name: str, workload: str, tier: Tier, interval: int) -> Iterator[Job]:
        """An empty folder for the time of a measurement."""
        prepared = self._disk / "prepared" / workload / name
        if not prepared.exists():
            prepared.mkdir(parents=True)
            if contenders.load(name).prepares:
                with worker(workload, name, self._disk / f"{name}.log") as preparing:
                    began = time.monotonic()
                    preparing.ask(Prepare(prepared), Done)
                    self._prepared_s[name][workload] = time.monotonic() - began
        parent = self._disk if tier is Tier.DISK else self._memory
        folder = Path(tempfile.mkdtemp(prefix=f"{workload}-{name}-", dir=parent))
        try:
            yield Job(folder, interval, tier, workload, prepared)
        finally:
            shutil.rmtree(folder)

    def _folder(self, parent: Path | None) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-", dir=parent))).resolve()
