"""Modelled times: the roofline of Williams, Waterman and Patterson (https://doi.org/10.1145/1498765.1498785)."""

from __future__ import annotations

from checkflow.graph import Graph, Op
from checkflow.hardware.profile import Profile


def operator_time_ns(op: Op, profile: Profile) -> int:
    """The longest of launch latency, arithmetic at the reached peak, and traffic at the reached bandwidth.

    An operator that neither computes nor moves anything (an allocation) launches nothing and takes no time.
    """
    if op.flops == op.traffic_bytes == 0:
        return 0
    flops_per_s = _reached(profile.peak_flops_per_s.of(op.dtype), profile.efficiency.compute)
    bytes_per_s = _reached(profile.memory_bandwidth_bytes_per_s, profile.efficiency.memory)
    return max(
        profile.launch_latency_ns, _duration_ns(op.flops, flops_per_s), _duration_ns(op.traffic_bytes, bytes_per_s)
    )


def retime(graph: Graph, profile: Profile) -> Graph:
    """The graph with the operator times that the profile models."""
    return graph.retimed(profile.name, [operator_time_ns(op, profile) for op in graph.ops])


def link_bytes_per_s(profile: Profile) -> int:
    """What the link really carries: its nominal bandwidth times its efficiency."""
    return _reached(profile.link_bandwidth_bytes_per_s, profile.efficiency.link)


def copy_ns(size_bytes: int, profile: Profile) -> int:
    """What a copy within the device's memory takes: each byte is read and written."""
    return round(2e9 * size_bytes / (profile.memory_bandwidth_bytes_per_s * profile.efficiency.memory))


def _reached(nominal: int, efficiency: float) -> int:
    return max(1, round(nominal * efficiency))


def _duration_ns(amount: int, per_s: int) -> int:
    return -(-amount * 1_000_000_000 // per_s)
