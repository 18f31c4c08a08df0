"""What is asked of a graph for each of its state tensors, found in one pass over all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkflow.graph import Graph, View
from checkflow.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Lookup:
    """Tensors are indices into the graph's; what has none of a kind is absent."""

    writes: Mapping[int, list[int]]  # by tensor: the steps that write it, ascending
    first_reads: Mapping[int, tuple[int, ...]]  # by tensor: all that the first operator reads that reads it
    named: Mapping[str, list[int]]  # by a view's name: the tensors with such a view
    views: Mapping[str, list[View]]  # by name
    entries: Mapping[str, list[int]]  # by a parameter's name: what its optimizer keeps of it
    gradients: Mapping[str, list[int]]  # by a parameter's name
    factor_rows: Mapping[int, int]  # by gradient: the first row's of the schedule
    places: Sequence[int]  # positions of the anchors, ascending
    begins: Sequence[int]  # positions at which updates begin, ascending

    def update_of(self, step: int) -> int:
        """How many updates have begun before a step: the number of the one that it is of, 0 for none."""
        return bisect_left(self.begins, step)


def lookup_of(schedule: Schedule, graph: Graph) -> Lookup:
    """All of it. It takes as long as the graph and the schedule are."""
    writes: dict[int, list[int]] = {}
    first_reads: dict[int, tuple[int, ...]] = {}
    for step, op in enumerate(graph.ops, start=1):
        for index in op.writes:
            writes.setdefault(index, []).append(step)
        for index in op.reads:
            first_reads.setdefault(index, op.reads)
    named: dict[str, list[int]] = {}
    views: dict[str, list[View]] = {}
    of: dict[str, dict[str, list[int]]] = {"optimizer": {}, "gradient": {}}
    for index, tensor in enumerate(graph.tensors):
        for name in dict.fromkeys(view.name for view in tensor.views):
            named.setdefault(name, []).append(index)
        for view in tensor.views:
            views.setdefault(view.name, []).append(view)
        if tensor.role.value in of:
            of[tensor.role.value].setdefault(tensor.of, []).append(index)
    return Lookup(
        writes=writes,
        first_reads=first_reads,
        named=named,
        views=views,
        entries=of["optimizer"],
        gradients=of["gradient"],
        factor_rows={row.id: row.factor_rows for row in reversed(schedule.gradients)},
        places=sorted(anchor.position for anchor in graph.anchors),
        begins=sorted(anchor.position for anchor in graph.anchors if anchor.kind.value == "optimizer_pre"),
    )
