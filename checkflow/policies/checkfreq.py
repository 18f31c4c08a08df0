"""CheckFreq (FAST '21): one snapshot of the whole state in GPU memory, then an asynchronous copy to the host."""

from __future__ import annotations

from checkflow.graph import Graph
from checkflow.link.grid import TICKS_PER_BYTE, Grid
from checkflow.plan import Problem


def checkfreq_peak_bytes(graph: Graph, problem: Problem) -> int:
    """Peak GPU memory when the state is snapshot whole at the iteration's end and freed once all of it has left.

    In its favour, the snapshot is taken to be free after the transfer alone (writing to disk holds no GPU memory). It
    covers the state that the iteration does not write too, as CheckFreq copies all of it.
    """
    state_bytes = sum(tensor.size_bytes for tensor in graph.tensors if tensor.role.is_state)
    grid = Grid.everywhere(problem)
    gone = min(grid.from_clock(state_bytes * TICKS_PER_BYTE), grid.period_cells)
    return max(grid.memory_bytes([(0, gone, state_bytes)]))
