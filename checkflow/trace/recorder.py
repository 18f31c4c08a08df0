"""The dispatch mode that sees every operator of a trace: it runs it, keeps the ledger, and records when asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from checkflow.graph import Collective
from checkflow.state.memory import has_storage
from checkflow.torch_internals import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    can_decompose,
    fake_device,
    schema_of,
    storage_id,
    unfolds,
)
from checkflow.trace.collectives import WAITS, collective_of
from checkflow.trace.costs import dtype_of, flops_of, traffic_of
from checkflow.trace.execution import OperatorResult, execute, user_line
from checkflow.trace.fx_program import FxProgram
from checkflow.trace.scratch import ScratchMeter
from checkflow.trace.stopwatch import Elapsed, Stopwatch
from checkflow.trace.storages import Ledger, Storage, is_new, is_scalar, without_storage
from checkflow.trace.unlisted import Watch
from checkflow.trace.values import Values
from checkflow.trace.workspaces import Workspaces
from checkflow.trace.writes import named_arguments, tensors_in, traits, written

Calls = Sequence[tuple[OpOverload, bool]]  # operators in order, and whether each is a step

COUNTED = 1000  # operators that are recorded until it is said
QUIET = ("prim", "profiler")  # queries and marks, not operators
# They return no tensor and still do work: the host waits for a value.
_READ_BY_HOST = frozenset(("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::allclose"))


@dataclass(frozen=True, slots=True)
class RecordedOperator:
    """One operator that does work; storages instead of indices."""

    name: str
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    flops: int
    traffic_bytes: int
    dtype: str
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class _Cost:
    """What an operator takes."""

    time_ns: Elapsed
    scratch_bytes: int


@dataclass
class Recording:
    """What one iteration did, as it happens."""

    program: FxProgram | None
    operators: list[RecordedOperator] = field(default_factory=list)
    calls: list[tuple[OpOverload, bool]] = field(default_factory=list)  # all, and whether each is a step
    costs: list[_Cost] = field(default_factory=list)  # of the operators, where they are measured
    targets: set[int] = field(default_factory=set)  # identities of the storages that were written, if by no element


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator and its arguments, as they were before it ran."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    given: list[tuple[str, list[torch.Tensor]]]  # tensors of each argument
    changed: frozenset[str]  # arguments
    tensors: list[torch.Tensor]
    targets: list[torch.Tensor]  # that it changes
    storages: list[Storage]
    node: torch.fx.Node | None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Above fake tensors, if there are any. Set `recording` to record, `watch` to watch; the ledger is always kept."""

    def __init__(
        self,
        ledger: Ledger,
        fake: FakeTensorMode | None,
        values: Values,
        stopwatch: Stopwatch | None = None,
        scratch: ScratchMeter | None = None,
        ignores: Callable[[], bool] = lambda: False,
        fails: Callable[[Exception], None] | None = None,
    ) -> None:
        """`stopwatch` times operators, `scratch` asks what they allocate for themselves.

        What runs while `ignores` says so is none of the iteration's.
        `fails` is told what goes wrong here, in place of the code that called the operator.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.fake = fake
        self.values = values
        self._stopwatch = stopwatch
        self._scratch = scratch
        self._ignores = ignores
        self._fails = fails
        self.workspaces = Workspaces(ledger)
        self.recording: Recording | None = None
        self.watch: Watch | None = None
        self.counted: Callable[[int], None] = lambda _: None  # told how many operators are recorded, now and then

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if (device := fake_device(func, args)) is not None:
            return device
        if unfolds(types):  # into operators that come here by themselves
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace in QUIET or self._ignores():
            return func(*args, **kwargs)
        if schema_of(func).name in WAITS:  # what waits for a collective is who uses its result
            return args[0] if self.fake is not None else func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and can_decompose(func):  # autograd does this elsewhere
            with self:
                return func.decompose(*args, **kwargs)
        if schema_of(func).name == "aten::lift_fresh" and is_new(args[0], self.ledger):
            return self._lift(func, args[0])
        try:
            call = self._called(func, args, kwargs)
            self._measure()
        except Exception as error:  # noqa: BLE001 (passed on, unless training must not notice)
            self._failed(error)
            return func(*args, **kwargs)
        executed = execute(
            func, args, kwargs, call.tensors, call.targets, self.ledger, self.fake, self.values, self.workspaces
        )
        try:
            self._returned(call, executed, self._measured())
        except Exception as error:  # noqa: BLE001 (likewise)
            self._failed(error)
        return executed.result

    def _failed(self, error: Exception) -> None:
        if self._fails is None:
            raise error
        self._fails(error)

    def _measure(self) -> None:
        if self._scratch is not None:
            self._scratch.start()
        if self._stopwatch is not None:
            self._stopwatch.start()

    def _measured(self) -> _Cost | None:
        if self._stopwatch is None:
            return None
        time_ns = self._stopwatch.stop()
        return _Cost(time_ns, 0 if self._scratch is None else self._scratch.stop()())

    def _called(self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> _Call:
        given = [(name, self._stored(value, "takes")) for name, value in named_arguments(func, args, kwargs)]
        changed = written(func, args, kwargs)
        tensors = [tensor for _, group in given for tensor in group]
        targets = [tensor for name, group in given if name in changed for tensor in group]
        storages = [self.ledger.see(tensor) for tensor in tensors]
        # A storage from outside (a loader's worker sends such) is no value of a program: what it holds is a constant.
        given_storage = any(isinstance(value, torch.UntypedStorage) for value in args)
        program = None if self.recording is None or given_storage else self.recording.program
        node = None if program is None else program.call(func, args, kwargs)
        return _Call(func, args, kwargs, given, changed, tensors, targets, storages, node)

    def _returned(self, call: _Call, executed: OperatorResult, cost: _Cost | None) -> None:
        func, given, targets, recording = call.func, call.given, call.targets, self.recording
        result = executed.result
        fresh = self._fresh(result)
        on_host = all(self.ledger.is_host(storage) for storage in call.storages)
        on_host = on_host and all(is_scalar(t) or (self.ledger.on_cuda and t.device.type == "cpu") for t in fresh)
        if torch.Tag.nondeterministic_seeded in func.tags and not self.ledger.on_cuda:
            on_host = False
        resized = [
            t.untyped_storage() for t, known in zip(call.tensors, call.storages, strict=True) if _resized(t, known)
        ]
        grown = any(storage.nbytes() for storage in resized)
        works = not on_host and (self._works(func, targets, fresh) or grown)
        if recording is not None and works:
            self.ledger.step += 1
        born = self.ledger.step if recording is not None and works else 0
        for tensor in fresh:
            self.ledger.add(tensor, scalar=on_host, born=born)
        made = [self.ledger.resized(each, born=born) for each in {storage_id(one): one for one in resized}.values()]
        if self.watch is not None:
            self.watch.made.update(made)
            self.watch.saw(func, given, call.changed, fresh, clears=_clears(func, call.args))
        if executed.known is not None and fresh:
            self.values.bind(result, executed.known[0])
        if not on_host:
            for tensor in targets:
                self.ledger.see(tensor).scalar = False
        if recording is not None:
            if recording.program is not None and call.node is not None:
                recording.program.results(call.node, result)
                recording.program.generated(call.kwargs.get("generator"))
            recording.calls.append((func, works))
            recording.targets.update(self.ledger.see(tensor).identity for tensor in targets)
            if works:
                self._record(recording, call, result, fresh, made, cost)

    def _record(
        self,
        recording: Recording,
        call: _Call,
        result: object,
        fresh: list[torch.Tensor],
        made: list[Storage],
        cost: _Cost | None,
    ) -> None:
        """It does work: it is a step of the iteration."""
        func = call.func
        unread = traits(func).unread
        reads = [s for name, group in call.given if name not in unread for s in map(self.ledger.see, group)]
        writes = [*(self.ledger.see(t) for t in (*call.targets, *fresh)), *made]
        for storage in (*reads, *writes):
            storage.last_use = self.ledger.step
        if recording.program is None:
            _name(writes, func, self.ledger.step)
        if cost is not None:
            recording.costs.append(cost)
        recording.operators.append(
            RecordedOperator(
                name=str(func),
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(dict.fromkeys(writes)),
                flops=flops_of(func, call.args, call.kwargs, result),
                traffic_bytes=traffic_of(func, call.args, call.kwargs, call.changed, fresh),
                dtype=dtype_of(func, call.args, call.kwargs, result),
                collective=collective_of(func, call.args, call.kwargs, result),
            )
        )

        if len(recording.operators) % COUNTED == 0:
            self.counted(len(recording.operators))

    def resized(self, storage: torch.UntypedStorage, before_bytes: int) -> None:
        """A storage was resized by no operator, as FSDP2 does: what it held is gone, and memory allocated for more.

        Allocating is a step as `empty` is one.
        """
        if storage.nbytes() == before_bytes or self.ledger.alive.get(storage_id(storage)) is None:
            return
        recording = self.recording if storage.nbytes() else None
        if recording is not None:
            self.ledger.step += 1
        found = self.ledger.resized(storage, born=self.ledger.step if recording is not None else 0)
        if self.watch is not None:
            self.watch.made.add(found)
        if recording is not None:
            found.last_use = self.ledger.step
            found.name = f"%resize_{self.ledger.step}"
            recording.operators.append(RecordedOperator("storage.resize_", (), (found,), 0, 0, "uint8"))

    def _lift(self, func: OpOverload, constant: torch.Tensor) -> object:
        """What torch.tensor(...) made reaches the program. No operator of the iteration: a constant, born before it."""
        executed = execute(func, (constant,), {}, [constant], [], self.ledger, self.fake, self.values, self.workspaces)
        lifted = executed.result
        assert isinstance(lifted, torch.Tensor)
        if self.ledger.find(lifted) is None:
            self.ledger.add(lifted, scalar=is_scalar(lifted))
        if executed.known is not None:
            self.values.bind(lifted, executed.known[0])
        if self.recording is not None:
            if self.recording.program is not None:
                self.recording.program.lift(constant, lifted)
            self.recording.calls.append((func, False))
        return lifted

    def _stored(self, value: object, verb: str) -> list[torch.Tensor]:
        """Its tensors, which have storages. A factory may make others; what an iteration meets of them is refused."""
        found = list(tensors_in(value))
        if all(map(has_storage, found)):
            return found
        if self.watch is not None:
            tensor = next(tensor for tensor in found if not has_storage(tensor))
            raise without_storage(user_line(), verb, tensor)
        return list(filter(has_storage, found))

    def _fresh(self, result: object) -> list[torch.Tensor]:
        """The first tensor of each storage in a result that was never seen before."""
        found: dict[int, torch.Tensor] = {}
        for tensor in self._stored(result, "makes"):
            identity = storage_id(tensor.untyped_storage())
            if identity not in self.ledger.alive:
                found.setdefault(identity, tensor)
        return list(found.values())

    @staticmethod
    def _works(func: OpOverload, targets: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> bool:
        if any(tensor.numel() for tensor in targets) or any(t.untyped_storage().nbytes() for t in fresh):
            return True
        return schema_of(func).name in _READ_BY_HOST


def _resized(tensor: torch.Tensor, known: Storage) -> bool:
    """Whether its storage has another size than it had, as `resize_`, `out=` and some kernels make it."""
    storage = tensor.untyped_storage()
    return storage.nbytes() != known.size_bytes and storage_id(storage) == known.identity


def _name(storages: Sequence[Storage], func: OpOverload, step: int) -> None:
    """What no program names has the name of who wrote it first."""
    for number, storage in enumerate(storages):
        storage.name = storage.name or f"%{schema_of(func).name.removeprefix('aten::')}_{step}_{number}"


def _clears(func: OpOverload, args: Sequence[object]) -> bool:
    """Whether what is written says nothing: zeros, whatever was there."""
    zeroes = str(func) in ("aten.zero_.default", "aten._foreach_zero_.default")
    return zeroes or (str(func) == "aten.fill_.Scalar" and args[1] == 0)
