"""The runtime itself, its hooks on a real training, on a device whose time is a number."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch

from checkflow import hardware, models
from checkflow.graph import Graph
from checkflow.runtime.binding import Binding
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, CopyEvent, Device, Snapshot
from checkflow.runtime.executor import Executor
from checkflow.runtime.hook import Removable, register
from checkflow.runtime.matching import bind
from checkflow.runtime.settings import Settings
from checkflow.runtime.sink import NamedSlot
from checkflow.schedule import Schedule
from checkflow.simulation.simulate import Iteration
from checkflow.trace import trace_training
from checkflow.trace.assumptions import assume_cuda_defaults
from checkflow.training import Training

TICKS_PER_BYTE = 10**9


def training_of(network: str, optimizer: str) -> Training:
    """Its update is that of CUDA, as the graph has it."""
    training = models.factory(network)(batch_size=2, optimizer=optimizer, small=True)
    assume_cuda_defaults(training)
    return training


def graph_of(network: str, optimizer: str) -> Graph:
    """A small network's iteration, with modelled times."""
    traced = trace_training(partial(training_of, network, optimizer), model=network, arguments=())
    return hardware.retime(traced.graph, hardware.load_profile("rtx3090"))


@dataclass(frozen=True, slots=True)
class VirtualEvent:
    order: int
    end_ticks: int


class VirtualDevice:
    """The compute stream is where `now` is; the link takes `ticks_per_byte` for each byte. Nothing is copied."""

    few_bytes = 0
    is_host = False

    def __init__(self, counters: Counters) -> None:
        self.now = 0
        self.ticks_per_byte = TICKS_PER_BYTE
        self.held_bytes = 0  # of snapshots
        self._counters = counters
        self._free = 0
        self._given = 0

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing to prepare."""

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[Snapshot]:
        made = [Snapshot(torch.empty_like(source)) for source in sources]
        for snapshot in made:
            self.held_bytes += snapshot.data.numel()
            weakref.finalize(snapshot.data, self._freed, snapshot.data.numel())
        return made

    def hold(self, source: torch.Tensor) -> Snapshot:
        return Snapshot(source)

    def offload(self, batch: Batch) -> VirtualEvent:
        size_bytes = batch.size_bytes
        self._free = max(self._free, self.now) + size_bytes * self.ticks_per_byte
        self._given += 1
        self._counters.offloaded_bytes += size_bytes
        self._counters.link_busy_ns += size_bytes * self.ticks_per_byte
        return VirtualEvent(self._given, self._free)

    def wait(self, event: CopyEvent, cause: Cause) -> None:
        assert isinstance(event, VirtualEvent)
        self._counters.stalled(cause, event.end_ticks - self.now)  # the counters' unit is a tick here
        self.now = event.end_ticks

    def done(self, event: CopyEvent) -> bool:
        assert isinstance(event, VirtualEvent)
        return event.end_ticks <= self.now

    def done_meanwhile(self, event: CopyEvent) -> bool:
        return self.done(event)

    def synchronize(self, event: CopyEvent, _timeout_s: float | None = None, /) -> bool:
        assert isinstance(event, VirtualEvent)
        self.now = max(self.now, event.end_ticks)
        return True

    def stalling(self, _cause: Cause, /) -> AbstractContextManager[None]:
        return nullcontext()  # `wait` counts in ticks

    def release(self, _snapshot: Snapshot, event: CopyEvent) -> None:
        if not self.done(event):
            self.wait(event, Cause.RELEASE)

    def capturing(self) -> bool:
        return False

    def check(self) -> None:
        """No background."""

    def collect(self) -> None:
        """Up to date."""

    def close(self) -> None:
        """Nothing runs."""

    def _freed(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


@dataclass
class EndlessSlots:
    """Always has a slot; all of them are the same memory, of which nobody looks at the content."""

    binding: Binding
    staged: list[int] = field(default_factory=list)
    index = 0

    def __post_init__(self) -> None:
        self._views: dict[str, bytearray] = {
            target.name: bytearray(torch.Size(target.shape).numel() * getattr(torch, target.dtype).itemsize)
            for target in self.binding.targets.values()
        }

    def view(self, name: str) -> memoryview:
        return memoryview(self._views[name])

    def acquire(self, _lane: int = 0, _completed: int | None = None) -> NamedSlot | None:
        return self

    def try_acquire(self, _lane: int = 0) -> NamedSlot | None:
        return self

    def stage(self, _slot: NamedSlot, iteration: int, _record: bytes, *, whole: bool = True) -> None:
        assert whole
        self.staged.append(iteration)

    def abandon(self, slot: NamedSlot) -> None:
        """As good as any."""

    def reclaim(self, but: Collection[int]) -> None:
        """Nothing is interrupted."""

    def break_off(self) -> None:
        """There are no lanes."""

    def pass_over(self, iteration: int) -> None:
        """Nobody else waits for it."""

    def poll(self) -> None:
        """No background."""


class TimedExecutor(Executor):
    """Time passes before each anchor: `arrive` is told its position."""

    arrive: Callable[[int], None]

    def reach(self, kind: str, subject: str) -> None:
        number = self.timetable.anchors.get((kind, subject), {}).get(self.fired[kind, subject] + 1)
        self.fired[kind, subject] += 1
        if number is not None:
            self.arrive(self.positions[number - 1])
        super().reach(kind, subject)

    def step(self) -> None:
        self.arrive(self.positions[-1])
        super().step()
        self.fired.clear()

    def follow(self, schedule: Schedule, arrive: Callable[[int], None]) -> None:
        self.fired = Counter[tuple[str, str]]()
        self.positions = [anchor.position for anchor in schedule.anchors]
        self.arrive = arrive


@dataclass
class Attached:
    """A training with its hooks in place."""

    training: Training
    executor: TimedExecutor
    counters: Counters
    handles: list[Removable]

    def iterate(self) -> dict[Cause, int]:
        """Train, and mark the iteration's end. What waited."""
        before = Counter(self.counters.stall_ns)
        self.training.iteration()
        self.executor.step()
        return dict(Counter(self.counters.stall_ns) - before)

    def close(self) -> None:
        try:
            self.executor.close()
        finally:
            self.executor._device.close()
        for handle in self.handles:
            handle.remove()


def attached(
    schedule: Schedule, training: Training, device: Device, counters: Counters, arrive: Callable[[int], None]
) -> Attached:
    """The runtime on a training whose optimizers have their state: the first update makes it."""
    training.iteration()
    binding = bind(schedule, training)
    executor = TimedExecutor(
        schedule,
        training,
        binding,
        device,
        EndlessSlots(binding),
        lambda _iteration: lambda: b"",
        counters,
        Settings(wait_when_full=True),
    )
    executor.timetable = replace(
        executor.timetable, hooked=frozenset(executor.timetable.anchors)
    )  # time passes at each
    executor.follow(schedule, arrive)
    return Attached(training, executor, counters, register(executor, training))


class VirtualRun:
    """Operators take the times that they are told to. Memory is looked at between anchors."""

    def __init__(self, schedule: Schedule, graph: Graph, training: Training, bandwidth_bytes_per_s: int) -> None:
        counters = Counters()
        self.device = VirtualDevice(counters)
        self.peak_bytes = 0
        self._bandwidth = bandwidth_bytes_per_s
        self._resident = graph.resident_bytes
        self._elapsed: list[int] = [0]
        self._position = 0
        self._attached = attached(schedule, training, self.device, counters, self._arrive)

    def iterate(self, times_ns: Sequence[int], ticks_per_byte: int = TICKS_PER_BYTE) -> Iteration:
        """One iteration, in ticks."""
        began = self.device.now
        self._elapsed = [0, *accumulate(time * self._bandwidth for time in times_ns)]
        self._position = 0
        self.device.ticks_per_byte = ticks_per_byte
        stalls = self._attached.iterate()
        return Iteration(self.device.now - began, stalls)

    def close(self) -> None:
        self._attached.close()

    def _arrive(self, position: int) -> None:
        if position > self._position:
            crossed = max(self._resident[self._position : position])
            self.peak_bytes = max(self.peak_bytes, crossed + self.device.held_bytes)
            self.device.now += self._elapsed[position] - self._elapsed[self._position]
            self._position = position
