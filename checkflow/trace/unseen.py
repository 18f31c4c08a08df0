"""State that is written though no operator shows it: by a CUDA graph, through NumPy's memory, by another process.

A plan would take it for state that never changes, and no version counter tells otherwise. So what no optimizer updates,
and an iteration was not seen to write, has to be the same before and after it.
"""

from __future__ import annotations

import torch

from checkflow.errors import TraceError
from checkflow.graph import Graph, Role
from checkflow.state.live import parameters_of
from checkflow.state.memory import fingerprint
from checkflow.torch_internals import storage_id, without_modes
from checkflow.trace.state import TracedState, state_of
from checkflow.training import Training


class Unseen:
    """Made before the iteration. Reads buffers and frozen parameters, which no recorder sees."""

    def __init__(self, training: Training, model: str) -> None:
        """`model`: who the graph will be of. Raises TraceError for state that cannot be checkpointed."""
        self._training = training
        with without_modes():
            self._before = {state.name: fingerprint(state.tensor) for state in _states(training, model)}

    def check(self, graph: Graph) -> None:
        """Raises TraceError where the iteration wrote what its graph says it does not."""
        written = {index for op in graph.ops for index in op.writes}
        still = {view.name for i, tensor in enumerate(graph.tensors) if i not in written for view in tensor.views}
        with without_modes():
            for state in _states(self._training, graph.model):
                before = self._before.get(state.name) if state.name in still else None
                if before is not None and not torch.equal(before, fingerprint(state.tensor)):
                    raise TraceError(
                        f"{graph.model}: {state.name} is written, and no operator shows where: by a CUDA graph, "
                        "through NumPy's memory or by another process; write it with torch's operators"
                    )


def _states(training: Training, model: str) -> list[TracedState]:
    """One for each storage that a plan may take for static. What `extra` lists it reads when the iteration ends."""
    found: dict[int, TracedState] = {}
    trained = {name for name, parameter in parameters_of(training) if parameter.requires_grad}
    for state in state_of(training, model):
        tensor, updated = state.tensor, state.role is Role.OPTIMIZER or state.name in trained
        at_end = state.host or state.elsewhere or state.name.is_extra
        if not updated and not at_end and tensor.layout == torch.strided:
            found.setdefault(storage_id(tensor.untyped_storage()), state)
    return list(found.values())
