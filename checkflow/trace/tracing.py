"""From a training factory to its graph and program: build, run one iteration, record the next."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from checkflow.collector import paused_collector
from checkflow.errors import CheckflowError, InputError, ModelFileError, TraceError
from checkflow.graph import Graph
from checkflow.missing import asked_for
from checkflow.state.live import parameters_of
from checkflow.state.refused import check_training
from checkflow.text import brief, said
from checkflow.torch_internals import FakeTensorMode
from checkflow.trace.assumptions import ON_CPU, assume_cuda_defaults, noting_disabled, unlike_cuda
from checkflow.trace.execution import DataDependent, failed_at, raised_at
from checkflow.trace.fakes import fake_tensors
from checkflow.trace.fx_program import FxProgram
from checkflow.trace.measure import measured
from checkflow.trace.memory import check_memory, expected_bytes, room_bytes, too_large
from checkflow.trace.ranks import World, as_ranks, divided, share_of
from checkflow.trace.reachable import reachable, sources_of
from checkflow.trace.record import IterationRecord
from checkflow.trace.recorder import Recorder
from checkflow.trace.replaced import replaced
from checkflow.trace.state import state_of
from checkflow.trace.storages import Ledger, OutOfRoom
from checkflow.trace.unlisted import Watch
from checkflow.trace.unseen import Unseen
from checkflow.trace.values import Values
from checkflow.training import Training
from checkflow.units import format_bytes

# What a fake tensor raises is none of these, unless it says so: code that does is wrong on real tensors, too.
_OF_CODE = (NameError, ImportError, SyntaxError, OSError, SystemExit)
_TOO_LARGE = ("allocate memory", "out of memory", "overflow when unpacking", "unable to allocate")


@dataclass(frozen=True)
class Traced:
    """A traced iteration: its graph, and where it was asked for its program, which `replay` runs on real tensors."""

    graph: Graph
    program: torch.fx.GraphModule | None
    real: bool  # traced on real tensors, not on fake ones
    notes: tuple[str, ...]  # for a person: what was assumed, and why


def _silent(_message: str) -> None:
    """No progress wanted."""


def trace_training(
    factory: Callable[[], Training],
    *,
    model: str,
    arguments: tuple[tuple[str, str], ...] = (),
    real: bool = False,
    cuda_defaults: bool = True,
    measure: bool = False,
    program: bool = False,
    world: World | None = None,
    progress: Callable[[str], None] = _silent,
) -> Traced:
    """Build a training, run one iteration unrecorded and record the next, all on fake tensors where that is possible.

    `model` and `arguments` go into the graph as they are; `real` asks for real tensors at once. On a CPU,
    `cuda_defaults` lets optimizers that leave the choice open use their foreach form, as they would on CUDA; `measure`
    runs and times them on this device, as they are. `program` keeps the torch.fx program. `world` says in which rank's
    place this is (`in_place_of`), if in any's. Raises ModelFileError where the factory is wrong, TraceError where the
    iteration cannot be traced.
    """
    attempt = _Attempt(factory, model, arguments, cuda_defaults and not measure, measure, program, world, progress)
    notes: tuple[str, ...] = ()
    fakes = 0 if real or measure else 2
    for everything in (False, True)[:fakes]:
        try:
            return attempt.run(FakeTensorMode(allow_non_fake_inputs=True), notes, everything=everything)
        except DataDependent as error:
            reads = f"{error.operator} {error.where} needs values"
            _drop(error)
            if attempt.stage == "factory" and not everything:
                notes = (f"{reads}: the model was built with real ones",)
                progress("building the model with values")
                continue
            notes = (f"{reads}: traced on real tensors",)
        except _CodeRaised as error:
            if not error.may_be_fake:
                raise error.of_user(model, arguments) from error.__cause__
            _drop(error)
            notes = (f"fake tensors failed {error.failed_at} ({error.what}): traced on real tensors",)
        break
    if fakes:
        check_memory(attempt.needed_bytes, model, attempt.stage, notes)
        progress("again, on real tensors")
    try:
        return attempt.run(None, notes)
    except _CodeRaised as error:
        raise error.of_user(model, arguments) from error.__cause__


def _drop(error: BaseException) -> None:
    """What an attempt made that is given up goes here. Nobody is told where a destructor fails at half an object."""
    with replaced(sys, "unraisablehook", lambda _: None):
        for each in filter(None, (error, error.__cause__, error.__context__)):
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
        gc.collect()


class _CodeRaised(Exception):
    """The user's factory or iteration raised."""

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__(stage)
        self.stage = stage
        self.where = raised_at(error.__traceback__)
        self.failed_at = failed_at(error.__traceback__)
        self.what = brief(error)
        self.runs_alone = False  # the iteration does not, where nobody looks on
        self.too_large = any(text in said(error).lower() for text in _TOO_LARGE)
        self.ran_dry = isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration)  # in a generator
        self.may_be_fake = "fake" in said(error).lower() or not (
            isinstance(error, _OF_CODE)
            or (isinstance(error, AttributeError) and "has no attribute" in said(error) and not _is_internal(error.obj))
        )

    def of_user(self, model: str, arguments: tuple[tuple[str, str], ...]) -> InputError:
        sizes = [f"{name}={value}" for name, value in arguments if value.replace("_", "").isdecimal()]
        advice = "correct it there"
        if self.too_large and sizes:
            advice = f"give a smaller value than {', '.join(sizes)}"
        if self.runs_alone:
            advice = "it runs where nobody records it, so leave it as it is and attach without a schedule"
        text = f"{model}: the {self.stage} raised {self.what} at {self.where}; {advice}"
        if self.ran_dry and self.stage == "iteration":
            text += ": the iteration is run several times, so let it use one batch, or itertools.cycle(...)"
        return ModelFileError(text) if self.stage == "factory" else TraceError(text)


def _is_internal(value: object) -> bool:
    """Whether it is of a class that torch keeps to itself, so that no user's code names its attributes."""
    module = type(value).__module__
    return module.startswith("torch.") and "._" in module


@contextmanager
def _users_code(stage: str) -> Iterator[None]:
    try:
        yield
    except (CheckflowError, DataDependent, OutOfRoom, KeyboardInterrupt):
        raise
    except BaseException as error:
        if line := asked_for(error, raised_at(error.__traceback__)):
            raise ModelFileError(line) from None
        raise _CodeRaised(stage, error) from error


@dataclass
class _Attempt:
    """One way to trace; `needed_bytes` is what is known so far of the memory that real tensors take."""

    factory: Callable[[], Training]
    model: str
    arguments: tuple[tuple[str, str], ...]
    cuda_defaults: bool
    measure: bool
    program: bool
    world: World | None
    progress: Callable[[str], None]
    needed_bytes: int = 0
    stage: str = "factory"  # or "iteration": where it is
    training: Training | None = None  # on real tensors

    def run(self, fake: FakeTensorMode | None, notes: tuple[str, ...], *, everything: bool = False) -> Traced:
        ledger = Ledger(room_bytes=room_bytes() if fake is None or everything else None)
        self.stage = "factory"
        try:
            return self._run(fake, notes, ledger, Values(ledger, everything=everything))
        except (DataDependent, _CodeRaised) as error:
            self.needed_bytes = max(self.needed_bytes, ledger.alive_bytes)
            if isinstance(error, _CodeRaised) and self.training is not None and self.world is None:
                error.runs_alone = _runs(self.training)
            raise
        except OutOfRoom:
            raise too_large(f"more than {format_bytes(ledger.real_bytes)}", self.model, self.stage, notes) from None

    def _run(self, fake: FakeTensorMode | None, notes: tuple[str, ...], ledger: Ledger, values: Values) -> Traced:
        recorder = Recorder(ledger, fake, values)
        said = list(notes)
        ranks = nullcontext() if self.world is None else as_ranks(recorder, values)
        with _random_state_kept(), noting_disabled(said), ranks, fake_tensors(fake, values), recorder:
            self.progress("building the model")
            with _users_code("factory"):
                training = check_training(self.factory(), self.model, ranks=self.world is not None)
            state_of(training, self.model)  # what is refused is, before anything has run
            if self.world is not None and self.world.divided:
                training = divided(training, self.world, self.model)
            self.stage = "iteration"
            self.training = training if fake is None else None
            values.built()
            ledger.on_cuda = any(p.device.type == "cuda" for _, p in parameters_of(training))
            if not ledger.on_cuda:
                said += (ON_CPU, *unlike_cuda(training))
                said += assume_cuda_defaults(training) if self.cuda_defaults else ()
            self.progress("iteration 1 of 2")
            recorder.watch = Watch(ledger, reachable(training), training)
            try:
                with _users_code("iteration"):
                    training.iteration()
            except (DataDependent, _CodeRaised):
                if fake is not None:
                    self.needed_bytes = expected_bytes(training, ledger)
                raise
            self.progress("iteration 2 of 2, recording")
            recorder.counted = lambda count: self.progress(f"iteration 2 of 2, {count} operators recorded")
            graph, record = self._record(training, recorder, said, is_real=fake is None)
            said += () if self.world is None else (share_of(training, self.world),)
            program = record.finished_program() if self.program else None
        if self.measure:
            self.progress("measuring operators")
            with _users_code("iteration"):
                found = measured(training.iteration, record.calls, on_cuda=ledger.on_cuda, model=self.model)
            graph = graph.retimed("measured", found.times_ns).with_scratch(found.scratch_bytes)
        return Traced(graph, program, real=fake is None, notes=tuple(said))

    def _record(
        self, training: Training, recorder: Recorder, said: list[str], *, is_real: bool
    ) -> tuple[Graph, IterationRecord]:
        """Run one iteration under an active recorder. `said` gets notes; `is_real`: so are its tensors."""
        gc.collect()
        unseen = Unseen(training, self.model, is_real=is_real)
        program = FxProgram(recorder.ledger, sources_of(training, self.model), kept=self.program)
        record = IterationRecord(training, recorder, self.model, partial(reachable, training), program)
        with paused_collector(), record.open(), _users_code("iteration"):
            training.iteration()
        graph = record.graph(self.arguments)
        unseen.check(graph, record.targets)
        if self.world is not None:
            graph = replace(graph, world_size=self.world.size, divided=self.world.divided)
        said += record.notes
        return graph, record


def _runs(training: Training) -> bool:
    """Whether an iteration does, as it is in training: nobody records it."""
    try:
        with _random_state_kept():
            training.iteration()
    except (Exception, SystemExit):  # noqa: BLE001 (whatever the user's code raises)
        return False
    return True


def _random_state_kept() -> AbstractContextManager[None]:
    """The default generators' state is put back at the end: the CPU's, and the current CUDA device's."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else [])
