"""State that is written though no operator shows it: by another thread or process, a CUDA graph, through NumPy.

A plan would take it for state that never changes. So what an iteration was not seen to write has to have its version
counter as before; and as not every writer counts, what no optimizer updates has to hold the same, too.
"""

from __future__ import annotations

import torch

from checkflow.errors import TraceError
from checkflow.graph import Graph, Role
from checkflow.state.live import parameters_of
from checkflow.state.memory import fingerprint
from checkflow.state.shards import local
from checkflow.torch_internals import storage_id, versions, without_modes
from checkflow.trace.state import TracedState, state_of
from checkflow.training import Training


class Unseen:
    """Made before the iteration. Reads buffers and frozen parameters, where they are real, which no recorder sees."""

    def __init__(self, training: Training, model: str, *, is_real: bool = True) -> None:
        """`model`: who the graph will be of. Raises TraceError for state that cannot be checkpointed."""
        self._training = training
        self._counts = _counts(training, model, frozenset())
        with without_modes():
            states = _states(training, model) if is_real else ()
            self._before = {state.name: fingerprint(state.tensor) for state in states}

    def check(self, graph: Graph, targets: frozenset[int]) -> None:
        """Raises TraceError where the iteration wrote what its graph says it does not.

        `targets`: identities of the storages that recorded operators wrote, so that their counters moved.
        """
        written = {index for op in graph.ops for index in op.writes}
        still = {view.name for i, tensor in enumerate(graph.tensors) if i not in written for view in tensor.views}
        for name, count in _counts(self._training, graph.model, targets).items():
            if name in still and count != self._counts.get(name, count):
                raise _written_unseen(graph.model, name)
        with without_modes():
            for state in _states(self._training, graph.model):
                before = self._before.get(state.name) if state.name in still else None
                if before is not None and not torch.equal(before, fingerprint(state.tensor)):
                    raise _written_unseen(graph.model, state.name)


def _written_unseen(model: str, name: str) -> TraceError:
    return TraceError(
        f"{model}: {name} is written, and no operator shows where: by another thread or process, by a CUDA graph or "
        "through NumPy's memory; write it with torch's operators, in the iteration's own thread"
    )


def _counts(training: Training, model: str, but: frozenset[int]) -> dict[str, list[int]]:
    """The version counters of state that counts its writes, but for that in storages of these identities."""
    found = {str(state.name): local(state.tensor) for state in state_of(training, model) if not _read_at_end(state)}
    return {
        name: versions([tensor])
        for name, tensor in found.items()
        if not tensor.is_inference() and storage_id(tensor.untyped_storage()) not in but
    }


def _read_at_end(state: TracedState) -> bool:
    return state.host or state.elsewhere or state.name.is_extra


def _states(training: Training, model: str) -> list[TracedState]:
    """One for each storage that a plan may take for static. What `extra` lists it reads when the iteration ends."""
    found: dict[int, TracedState] = {}
    trained = {name for name, parameter in parameters_of(training) if parameter.requires_grad}
    for state in state_of(training, model):
        tensor, updated = state.tensor, state.role is Role.OPTIMIZER or state.name in trained
        if not updated and not _read_at_end(state) and tensor.layout == torch.strided:
            found.setdefault(storage_id(tensor.untyped_storage()), state)
    return list(found.values())
