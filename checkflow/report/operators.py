"""An iteration's operators by what they hand to each other, and the path through them that takes longest."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from checkflow.graph import Graph


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Operators each of which needs the one before: however many ran at once, the iteration would take this long."""

    steps: tuple[int, ...]
    time_ns: int
    share: float  # of the iteration, which runs them one by one; 0 where no operator has a time

    def longest(self, graph: Graph, count: int) -> list[int]:
        """Its longest operators' steps, longest first."""
        return sorted(self.steps, key=lambda step: -graph.ops[step - 1].time_ns)[:count]


def dag(graph: Graph) -> nx.DiGraph[int]:
    """An edge from each step that wrote a storage to each that uses it until it is written again."""
    found: nx.DiGraph[int] = nx.DiGraph(model=graph.model, device=graph.device)
    writer: dict[int, int] = {}
    for step, op in enumerate(graph.ops, start=1):
        found.add_node(step, name=op.name, time_ns=op.time_ns, flops=op.flops, traffic_bytes=op.traffic_bytes)
        handed: dict[int, list[int]] = {}
        for index in dict.fromkeys((*op.reads, *op.writes)):
            if index in writer:
                handed.setdefault(writer[index], []).append(index)
        for source, indices in handed.items():
            tensors = [graph.tensors[index] for index in indices]
            size_bytes = sum(tensor.size_bytes for tensor in tensors)
            found.add_edge(source, step, storages=", ".join(t.name for t in tensors), size_bytes=size_bytes)
        writer.update(dict.fromkeys(op.writes, step))
    return found


def critical_path(graph: Graph) -> CriticalPath:
    """The longest path of the DAG by time."""
    operators = dag(graph)
    until_ns: dict[int, int] = {}  # the longest path that ends with a step
    before: dict[int, int | None] = {}
    for step in operators:  # edges lead to later steps, so that those before it are known
        before[step] = max(operators.predecessors(step), key=until_ns.__getitem__, default=None)
        until_ns[step] = graph.ops[step - 1].time_ns + until_ns.get(before[step] or 0, 0)
    steps: list[int] = []
    at = max(until_ns, key=until_ns.__getitem__, default=None)
    time_ns = until_ns[at] if at is not None else 0
    while at is not None:
        steps.append(at)
        at = before[at]
    return CriticalPath(tuple(reversed(steps)), time_ns, time_ns / (graph.iteration_time_ns or 1))
