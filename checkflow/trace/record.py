"""One iteration under an active recorder, and the graph of what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from checkflow.errors import TraceError
from checkflow.graph import AnchorKind, Graph
from checkflow.state.live import parameters_of
from checkflow.trace.assemble import Replaced, assemble, notes_of
from checkflow.trace.fx_program import FxProgram
from checkflow.trace.hooks import FiredAnchors, hooked, mark_gradient
from checkflow.trace.reachable import Reached
from checkflow.trace.recorder import Calls, Recorder, Recording
from checkflow.trace.state import TracedState, state_of
from checkflow.trace.storages import Ledger, Storage
from checkflow.trace.unlisted import Watch, unlisted
from checkflow.training import Training


class IterationRecord:
    """Open it, run the iteration, close it, ask for the graph.

    Args:
        training: as it is when the iteration begins.
        recorder: active; its `watch` is of the iteration before.
        model: who the graph is of.
        reached: what code can reach now, by name.
        program: built while it runs; None where nobody wants it.
    """

    def __init__(
        self,
        training: Training,
        recorder: Recorder,
        model: str,
        reached: Callable[[], Mapping[str, Reached]],
        program: FxProgram | None,
    ) -> None:
        self.notes: tuple[str, ...] = ()  # for a person
        self._training = training
        self._recorder = recorder
        self._ledger = ledger = recorder.ledger
        self._model = model
        self._reached = reached
        ledger.start()
        assert recorder.watch is not None
        self._first, self._second = recorder.watch, Watch(ledger, reached(), training)
        self._before = _bound_states(training, ledger, model)
        for name, parameter in parameters_of(training):
            mark_gradient(parameter, name, ledger)
        self._recording = Recording(program)
        self._firings = FiredAnchors(ledger, recorder)

    @property
    def calls(self) -> Calls:
        """All operators that ran, and whether each is a step."""
        return self._recording.calls

    @property
    def targets(self) -> frozenset[int]:
        """Identities of the storages that these wrote, also where that was no element of theirs."""
        return frozenset(self._recording.targets)

    @contextmanager
    def open(self) -> Iterator[None]:
        """The iteration runs within."""
        recorder, program = self._recorder, self._recording.program
        random = nullcontext() if program is None else program.recording_random_state()
        try:
            with hooked(self._training, self._firings, self._ledger), random:
                recorder.recording, recorder.watch = self._recording, self._second
                yield
        finally:
            recorder.recording = recorder.watch = None

    def graph(self, arguments: tuple[tuple[str, str], ...]) -> Graph:
        """What the iteration did; it has ended just now. Raises TraceError where no checkpoint has room for its
        state, or another thread did some of it.

        Operators have their costs where the recorder measures them.
        """
        training, ledger, recording = self._training, self._ledger, self._recording
        self._firings.fire(AnchorKind.ITERATION_END, "")
        if self._firings.unrecorded:
            raise TraceError(
                f"{self._model}: the iteration uses another thread for {self._firings.unrecorded}, where no operator "
                "is recorded; run all of it in one thread to have it planned; attach does without a schedule"
            )
        for name, parameter in parameters_of(training):
            mark_gradient(parameter, name, ledger)
        states, after = _kept(self._before, state_of(training, self._model))
        replaced = _replaced(states, after, ledger, self._model)
        self.notes = tuple(notes_of(replaced))
        graph = assemble(
            model=self._model,
            arguments=arguments,
            states=states,
            replaced=replaced,
            operators=recording.operators,
            anchors=self._firings.kept(),
            ledger=ledger,
        )
        found = unlisted(
            training, self._first, self._second, {ledger.see(s.tensor) for s in after}, ledger, self._reached()
        )
        return _measured(replace(graph, unlisted=found), recording)

    def constants(self) -> frozenset[int]:
        """Identities of the storages that the iteration read as it found them, and did not write."""
        return self._second.constants()

    def finished_program(self) -> torch.fx.GraphModule:
        """The program that was kept."""
        assert self._recording.program is not None
        left: dict[str, torch.Tensor] = {
            name: p.grad for name, p in parameters_of(self._training) if p.grad is not None
        }
        return self._recording.program.finish(left)


def _measured(graph: Graph, recording: Recording) -> Graph:
    if not recording.costs:
        return graph
    graph = graph.retimed("measured", [cost.time_ns() for cost in recording.costs])
    return graph.with_scratch([cost.scratch_bytes for cost in recording.costs])


def _bound_states(training: Training, ledger: Ledger, model: str) -> list[tuple[TracedState, Storage]]:
    """Every state name with its storage, which is marked as such."""
    bound: list[tuple[TracedState, Storage]] = []
    for state in state_of(training, model):
        storage = ledger.see(state.tensor)
        if storage.role is None or not storage.role.is_state:
            storage.role, storage.scalar = state.role, state.host
        bound.append((state, storage))
    return bound


def _kept(
    before: list[tuple[TracedState, Storage]], after: tuple[TracedState, ...]
) -> tuple[list[tuple[TracedState, Storage]], tuple[TracedState, ...]]:
    """All but what a dict that was listed did not have before, or now has in another shape: the record takes that."""
    kinds = [{s.name: (s.tensor.shape, s.tensor.dtype) for s in states} for states in ([s for s, _ in before], after)]

    def stays(state: TracedState) -> bool:
        return not state.may_change or kinds[0].get(state.name) == kinds[1].get(state.name)

    for state, storage in before:
        if not stays(state):
            storage.role = None
    return [found for found in before if stays(found[0])], tuple(filter(stays, after))


def _replaced(
    before: list[tuple[TracedState, Storage]], after: tuple[TracedState, ...], ledger: Ledger, model: str
) -> tuple[Replaced, ...]:
    """State that the iteration replaced instead of updating it in place.

    Raises TraceError where it makes or drops state, or changes its size: no checkpoint has room for that.
    """
    known = {state.name: (state, storage) for state, storage in before}
    now = {state.name: (state, ledger.see(state.tensor)) for state in after}
    found: list[Replaced] = []
    updated = {state.of for state, _ in before if state.of}
    for name in dict.fromkeys((*known, *now)):
        if name not in known and (of := now[name][0].of) and updated and of not in updated:
            raise TraceError(
                f"{model}: the iteration updates {of}, which those before it did not (branches that take turns?); give "
                "each the same input, or let the factory make an update of every parameter"
            )
        if name not in known or name not in now:
            raise TraceError(
                f"{model}: the iteration {'drops' if name in known else 'creates'} {name}; keep "
                "state from one iteration to the next, and create it in the first"
            )
        (old, storage), (new, other) = known[name], now[name]
        if (old.tensor.shape, old.tensor.dtype) != (new.tensor.shape, new.tensor.dtype):
            raise TraceError(
                f"{model}: the iteration makes {name} a tensor of shape {tuple(new.tensor.shape)}, {new.tensor.dtype}; "
                f"it was {tuple(old.tensor.shape)}, {old.tensor.dtype}; keep shape and dtype"
            )
        if old.tensor is new.tensor and storage.size_bytes != other.size_bytes:
            raise TraceError(
                f"{model}: the iteration resizes {name}, from {storage.size_bytes} to {other.size_bytes} bytes; make "
                "such a change in the factory, or in the first iteration"
            )
        on_host = ledger.is_host(storage) and ledger.is_host(other)
        if storage is not other and not on_host and not new.elsewhere:
            found.append(Replaced(name, storage, other))
    return tuple(found)
