"""How long ranks take over what they do together, and how much of that their own operators hide."""

from __future__ import annotations

from collections.abc import Sequence

from checkflow.graph import Collective, CollectiveKind, Graph
from checkflow.hardware.profile import Network

_NS = 1_000_000_000


def collective_ns(collective: Collective, network: Network) -> int:
    """What a collective takes where nothing disturbs it, by the ring of Thakur, Rabenseifner and Gropp
    (https://doi.org/10.1177/1094342005051521): p ranks pass n bytes on in p - 1 messages, an all-reduce twice.

        (p - 1) / p * n / bandwidth + (p - 1) * latency

    Of a group with m ranks on a node, as many rings leave it by as many adapters, as NCCL lays them: the bandwidth is
    the lesser of one device's within the node and m adapters' between nodes. In an all-to-all each sends by its own.
    """
    ranks, size = collective.ranks, collective.size_bytes
    if ranks == 1:
        return 0
    here = max(1, min(ranks, network.devices_per_node // collective.stride))  # on a node
    nodes = -(-ranks // here)
    within, between = network.within_node_bytes_per_s, network.between_nodes_bytes_per_s
    if collective.kind is CollectiveKind.BETWEEN_TWO:
        return size * _NS // (within if nodes == 1 else max(within, between))
    if collective.kind is CollectiveKind.ALL_TO_ALL:
        moved_ns = max((here - 1) * size * _NS // (ranks * within), (ranks - here) * size * _NS // (ranks * between))
        return moved_ns + (network.between_nodes_ns if nodes > 1 else network.within_node_ns)
    bandwidth = within if nodes == 1 else between if here == 1 else min(within, here * between)
    moved_ns = (ranks - 1) * size * _NS // (ranks * bandwidth)
    passes = 2 if collective.kind is CollectiveKind.ALL_REDUCE else 1
    return passes * (moved_ns + (ranks - nodes) * network.within_node_ns + (nodes - 1) * network.between_nodes_ns)


def overlapped(graph: Graph, times_ns: Sequence[int]) -> list[int]:
    """The time of each operator where collectives run beside the others: its own, and what it waits for them.

    Collectives of a group run in order, each from when what it takes is there. That is at once for what follows from
    state alone that the iteration has not written yet, since it can be prefetched. Who uses a result waits for it, and
    the iteration's end for all. `times_ns` has what each operator takes by itself; a collective adds nothing else.
    """
    clock = 0
    made: dict[int, int] = {}  # tensor -> when what it holds is there
    early = {i: 0 for i, tensor in enumerate(graph.tensors) if tensor.role.is_state}  # when what follows from it may be
    ended: dict[tuple[int, int], int] = {}  # group -> when its last one ends
    found: list[int] = []
    for op, time_ns in zip(graph.ops, times_ns, strict=True):
        used = (*op.reads, *op.writes)
        prefetched = all(i in early for i in op.reads)
        begin = max((early[i] for i in op.reads), default=0) if prefetched else None
        if op.collective is not None:
            group = (op.collective.ranks, op.collective.stride)
            start = max(ended.get(group, 0), max((made.get(i, 0) for i in used), default=0) if begin is None else begin)
            ended[group] = end = start + time_ns
            found.append(0)
        else:
            end = max(clock, max((made.get(i, 0) for i in used), default=0)) + time_ns
            found.append(end - clock)
            clock = end
        for i in op.writes:
            made[i] = end
            early.pop(i, None)
            if begin is not None:
                early[i] = end if op.collective is not None else begin + time_ns
    if found:
        found[-1] += max(0, max(ended.values(), default=0) - clock)
    return found
