"""Trains small models with a schedule and compares every staged checkpoint with the state as it was at that moment."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from checkflow.foreach import Look, can_look
from checkflow.runtime.binding import Binding, Target
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, CopyEvent, Device, Snapshot
from checkflow.runtime.executor import Executor
from checkflow.runtime.guards import GuardKind
from checkflow.runtime.hook import Removable, register
from checkflow.runtime.host import HostEvent
from checkflow.runtime.matching import bind
from checkflow.runtime.settings import Settings
from checkflow.runtime.sink import NamedSlot
from checkflow.schedule import ActionRow, AnchorRow, Certificate, Schedule, StateRow, ViewRow
from checkflow.state.live import live_state, parameter_names
from checkflow.state.names import StateName, holders
from checkflow.training import Training
from checkflow.wrapped import is_hookable

State = dict[str, bytes]


def state_bytes(training: Training, targets: Mapping[StateName, Target] | None = None) -> State:
    """Every state tensor's bytes, as they lie in memory, or in the order of its target."""
    found: State = {}
    for live in live_state(training):
        target = (targets or {}).get(live.name)
        tensor = live.tensor.detach()
        found[live.name] = memory_of(tensor if target is None else tensor.permute(target.order).contiguous())
    return found


def memory_of(tensor: torch.Tensor) -> bytes:
    size = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), start, (size,), (1,)).cpu().numpy().tobytes()


@dataclass
class MemorySlot:
    """Plain memory."""

    index: int
    buffers: dict[str, bytearray]
    staged: State | None = None

    def view(self, name: str) -> memoryview:
        return memoryview(self.buffers[name])


@dataclass
class MemorySink:
    """Keeps what was staged; a slot is free as soon as it is staged, or `hold` stagings later."""

    binding: Binding
    slots: int = 3
    hold: int = 0
    wait: bool = True
    staged: dict[int, State] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    waited: list[int | None] = field(default_factory=list)  # how many iterations were completed, each time
    error: Exception | None = None

    def __post_init__(self) -> None:
        stored = [target for target in self.binding.targets.values() if target.alias_of is None]
        self._all = [
            MemorySlot(index, {target.name: bytearray(_size(target.dtype, target.shape)) for target in stored})
            for index in range(self.slots)
        ]
        self._free = deque(self._all)
        self._held: deque[MemorySlot] = deque()

    def acquire(self, _lane: int = 0, completed: int | None = None) -> MemorySlot | None:
        if not self._free and self.wait and len(self._held) > 1:  # never the newest staged one
            self.waited.append(completed)
            self._free.append(self._held.popleft())
        return self.try_acquire()

    def try_acquire(self, _lane: int = 0) -> MemorySlot | None:
        if not self._free:
            return None
        slot = self._free.popleft()
        if slot.staged is not None:
            assert slot.staged == {name: bytes(data) for name, data in slot.buffers.items()}, "written after staging"
        slot.staged = None
        return slot

    def stage(self, slot: NamedSlot, iteration: int, record: bytes, *, whole: bool = True) -> None:
        assert whole
        mine = self._all[slot.index]
        mine.staged = {name: bytes(data) for name, data in mine.buffers.items()}
        self.staged[iteration] = mine.staged
        self.records[iteration] = record
        self.order.append(iteration)
        self._held.append(mine)
        while len(self._held) > self.hold:
            self._free.append(self._held.popleft())

    def abandon(self, slot: NamedSlot) -> None:
        self._free.append(self._all[slot.index])

    def reclaim(self, but: Collection[int]) -> None:
        known = {slot.index for slot in (*self._free, *self._held)}
        self._free += [slot for slot in self._all if slot.index not in known and slot.index not in but]

    def break_off(self) -> None:
        """There are no lanes."""

    def pass_over(self, iteration: int) -> None:
        """Nobody else waits for it."""

    def poll(self) -> None:
        if self.error is not None:
            raise self.error


def _size(dtype: str, shape: Sequence[int]) -> int:
    size: int = getattr(torch, dtype).itemsize
    for extent in shape:
        size *= extent
    return size


class LateDevice:
    """Copies an offload only when it is waited for, or when `lag` younger ones were issued: as late as it may."""

    is_host = False

    def __init__(self, counters: Counters, lag: int, few_bytes: int) -> None:
        self.few_bytes = few_bytes
        self._counters = counters
        self._lag = lag
        self._jobs: deque[Batch] = deque()
        self._given = 0
        self._ended = 0
        self.captures = False

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing to prepare."""

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[Snapshot]:
        self._counters.snapshot_bytes += sum(source.numel() for source in sources)
        return [Snapshot(source.clone()) for source in sources]

    def hold(self, source: torch.Tensor) -> Snapshot:
        return Snapshot(source)

    def offload(self, batch: Batch) -> HostEvent:
        self._jobs.append(batch)
        self._given += 1
        self._run(self._given - self._lag)
        return HostEvent(self._given)

    def wait(self, event: CopyEvent, cause: Cause) -> None:
        self._counters.stalled(cause, 1)
        self._run(event.order)

    def done(self, event: CopyEvent) -> bool:
        return self._ended >= event.order

    def done_meanwhile(self, event: CopyEvent) -> bool:
        return self.done(event)

    def synchronize(self, event: CopyEvent, _timeout_s: float | None = None, /) -> bool:
        self._run(event.order)
        return True

    def release(self, _snapshot: Snapshot, event: CopyEvent) -> None:
        if not self.done(event):
            self.wait(event, Cause.RELEASE)

    def stalling(self, cause: Cause) -> AbstractContextManager[None]:
        return self._counters.stalling(cause)

    def capturing(self) -> bool:
        return self.captures

    def check(self) -> None:
        """No background."""

    def collect(self) -> None:
        """Up to date."""

    def close(self) -> None:
        self._jobs.clear()

    def _run(self, order: int) -> None:
        while self._ended < min(order, self._given):
            for copy in self._jobs.popleft():
                copy.destination.copy_(copy.source)
                self._counters.offloaded_bytes += copy.source.numel()
            self._ended += 1


@dataclass
class Case:
    """A training, its iteration by number, and hooks' owner."""

    training: Training
    iterate: Callable[[int], object]


Factory = Callable[[], Case]


def _inside(
    optimizer: torch.optim.Optimizer, note: Callable[[str, str], Callable[..., None]], prefix: str
) -> list[torch.utils.hooks.RemovableHandle]:
    def before(function: str, _: object) -> None:
        note("update", f"{prefix}/{function}")()

    def begin(*_: object) -> None:
        look.open()

    def end(*_: object) -> None:
        look.close()

    look = Look(before, 0)
    return [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]


def anchors_of(case: Case) -> list[tuple[str, str, int]]:
    """Every firing of one iteration, as (kind, subject, occurrence), found with hooks of our own."""
    fired: list[tuple[str, str]] = []
    handles: list[torch.utils.hooks.RemovableHandle] = []
    training = case.training

    def note(kind: str, subject: str) -> Callable[..., None]:
        return lambda *_: fired.append((kind, subject))

    names = parameter_names(training)
    for prefix, model in zip(holders("model", len(training.models)), training.models, strict=True):
        for path, module in model.named_modules():
            subject = f"{prefix}/{path}" if path else prefix
            handles.append(module.register_forward_pre_hook(note("forward_pre", subject)))
            handles.append(module.register_forward_hook(note("forward", subject)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(note("gradient", names[id(parameter)])))  # type: ignore[no-untyped-call]
    for prefix, optimizer in zip(holders("optimizer", len(training.optimizers)), training.optimizers, strict=True):
        if is_hookable(optimizer):
            handles.append(optimizer.register_step_pre_hook(note("optimizer_pre", prefix)))
            handles.append(optimizer.register_step_post_hook(note("optimizer", prefix)))
            if can_look(optimizer):
                handles += _inside(optimizer, note, prefix)
    case.iterate(1)
    for handle in handles:
        handle.remove()
    seen: Counter[tuple[str, str]] = Counter()
    rows = []
    for kind, subject in [*fired, ("iteration_end", "")]:
        seen[kind, subject] += 1
        rows.append((kind, subject, seen[kind, subject]))
    return rows


def random_schedule(factory: Factory, seed: int, *, interval: int = 1, snapshots: float = 0.3) -> Schedule:
    """A schedule with each written byte moved once, at places drawn without regard for any deadline."""
    rng = random.Random(seed)
    case = factory()
    case.iterate(0)
    before = state_bytes(case.training)
    anchors = anchors_of(case)
    after = state_bytes(case.training)
    rows, places = [], [(i, a) for i in range(interval + 1) for a in range(1, len(anchors) + 1)]
    places = places[len(anchors) // 2 : len(places) - 1]
    actions: list[ActionRow] = []
    storages: dict[int, list[ViewRow]] = {}
    sizes: dict[int, int] = {}
    written: dict[int, bool] = {}
    for live in live_state(case.training):
        if live.optimizer is not None and live.tensor.dim() == 0 and not _on_device(case.training):
            continue
        pointer = live.tensor.untyped_storage().data_ptr()
        sizes[pointer] = live.tensor.untyped_storage().nbytes()
        if sizes[pointer]:
            dtype = str(live.tensor.dtype).removeprefix("torch.")
            storages.setdefault(pointer, []).append(
                ViewRow(name=live.name, dtype=dtype, shape=tuple(live.tensor.shape))
            )
            written[pointer] = written.get(pointer, False) or before[live.name] != after[live.name]
    for number, (pointer, views) in enumerate(storages.items()):
        rows.append(StateRow(id=number, bytes=sizes[pointer], written=written[pointer], views=tuple(views)))
        if not written[pointer]:
            continue
        cuts = sorted({0, sizes[pointer], *(rng.randrange(sizes[pointer]) for _ in range(rng.randrange(3)))})
        for start, end in pairwise(cuts):
            held = rng.random() < snapshots
            first, second, third = sorted(rng.sample(range(len(places)), 3))
            second = second if held else rng.randrange(len(places))
            actions.append(
                ActionRow(
                    tensor=number,
                    offset=start,
                    bytes=end - start,
                    snapshot=places[first] if held else None,
                    offload=places[second],
                    release=places[third] if held else None,
                )
            )
    return schedule_of(rows, sorted(actions, key=lambda row: row.offload), anchors, interval)


def _on_device(training: Training) -> bool:
    return any(group.get("fused") or group.get("capturable") for o in training.optimizers for group in o.param_groups)


def schedule_of(
    rows: Sequence[StateRow], actions: Sequence[ActionRow], anchors: Sequence[tuple[str, str, int]], interval: int
) -> Schedule:
    """A schedule of which only state, anchors and actions matter."""
    digest = "sha256:" + "0" * 64
    return Schedule(
        graph_fingerprint=digest,
        state_fingerprint=digest,
        model="by hand",
        arguments=(),
        device="by hand",
        traced_on="cpu",
        formulation="direct",
        transfers="streaming",
        interval=interval,
        bandwidth_bytes_per_s=10**9,
        slack_ppm=0,
        chunk_bytes=None,
        granule_bytes=1,
        memory_limit_bytes=None,
        steps=len(anchors),
        iteration_time_ns=10**6,
        state_bytes=sum(row.bytes for row in rows if row.written),
        static_state_bytes=sum(row.bytes for row in rows if not row.written),
        certificate=Certificate(
            training_peak_bytes=0,
            peak_bytes=0,
            lower_bound_bytes=0,
            ideal_peak_bytes=0,
            gap=0.0,
            snapshot_bytes=0,
            solver="none",
            solver_why="by hand",
        ),
        state=tuple(rows),
        anchors=tuple(
            AnchorRow(kind=kind, subject=subject, occurrence=occurrence, position=position)
            for position, (kind, subject, occurrence) in enumerate(anchors, start=1)
        ),
        actions=tuple(actions),
    )


@dataclass
class Rig:
    """An executor on a live training."""

    case: Case
    executor: Executor
    sink: MemorySink
    counters: Counters
    expected: dict[int, State] = field(default_factory=dict)
    handles: list[Removable] = field(default_factory=list)

    def run(self, iterations: int) -> None:
        """Train and mark each iteration's end."""
        for _ in range(iterations):
            self.case.iterate(self.executor.completed)
            self.mark()

    def mark(self) -> None:
        self.expected[self.executor.completed + 1] = state_bytes(self.case.training, self.sink.binding.targets)
        self.executor.step()

    def close(self) -> None:
        try:
            self.executor.close()
        finally:
            self.executor._device.close()
        for handle in self.handles:
            handle.remove()

    def torn(self) -> list[tuple[int, str]]:
        """(iteration, tensor) of every staged tensor that is not what it was when its iteration ended."""
        wrong = []
        for iteration, staged in self.sink.staged.items():
            expected = self.expected[iteration]
            for name, data in staged.items():
                if name in expected and data != expected[name]:
                    wrong.append((iteration, name))
            missing = {n for n in expected if n not in staged and n not in self._elsewhere()}
            assert not missing, missing
        return wrong

    def _elsewhere(self) -> set[str]:
        """Names that are tied to others, and scalars that the host's record holds."""
        aliases = {t.name for t in self.sink.binding.targets.values() if t.alias_of is not None}
        scalars = {live.name for live in live_state(self.case.training) if live.tensor.dim() == 0}
        return aliases | (scalars - set(self.sink.binding.targets))


def rig(
    factory: Factory,
    schedule: Schedule,
    *,
    lag: int = 10**9,
    few_bytes: int = 0,
    device: Callable[[Counters], Device] | None = None,
    slots: int = 3,
    hold: int = 0,
    wait: bool = True,
    interval: int | None = None,
    disarmed: frozenset[GuardKind] = frozenset(),
    audit: bool = False,
) -> Rig:
    """The training of a factory, attached by hand."""
    case = factory()
    counters = Counters()
    binding = bind(schedule, case.training)
    sink = MemorySink(binding, slots=slots, hold=hold, wait=wait)
    executor = Executor(
        schedule,
        case.training,
        binding,
        device(counters) if device is not None else LateDevice(counters, lag, few_bytes),
        sink,
        lambda iteration: lambda: b"%d" % iteration,
        counters,
        Settings(interval, wait_when_full=wait, audit=audit, disarmed=disarmed),
    )
    made = Rig(case, executor, sink, counters)
    made.handles = register(executor, case.training)
    return made
