"""Modelled times: the roofline of Williams, Waterman and Patterson (https://doi.org/10.1145/1498765.1498785)."""

from __future__ import annotations

from checkflow.errors import InputError
from checkflow.graph import Graph, Op
from checkflow.hardware.network import collective_ns, overlapped
from checkflow.hardware.profile import NAMES, CopyRates, Network, Profile, load_profile
from checkflow.units import MOST

UPDATE_PASSES = 13  # through host memory, of each byte of state that the host updates (benchmarks/replica.py)


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
    """The graph with the operator times that the profile models; collectives run beside the other operators.

    Raises InputError where ranks do something together and the profile has no network, and for figures so small that
    no graph can hold the times.
    """
    times_ns = _times_ns(graph, profile)
    if max(times_ns, default=0) > MOST:
        slowest = graph.ops[times_ns.index(max(times_ns))].name
        raise InputError(f"{profile.name}: {slowest} would take {MOST} ns and more; correct this profile's figures")
    return graph.retimed(profile.name, times_ns)


def _times_ns(graph: Graph, profile: Profile) -> list[int]:
    if not any(op.collective is not None and op.collective.ranks > 1 for op in graph.ops):
        return [operator_time_ns(op, profile) for op in graph.ops]
    network = _network(profile)
    alone = [
        operator_time_ns(op, profile) if op.collective is None else collective_ns(op.collective, network)
        for op in graph.ops
    ]
    return overlapped(graph, alone)


def link_bytes_per_s(profile: Profile, ranks: int = 1) -> int:
    """What the link really carries: its nominal bandwidth times its efficiency.

    Of several ranks those on one node share its host memory's bandwidth. Raises InputError where the profile does not
    say what that is.
    """
    link = _reached(profile.link_bandwidth_bytes_per_s, profile.efficiency.link)
    if ranks == 1:
        return link
    network = _network(profile)
    memory = _reached(network.host_memory_bandwidth_bytes_per_s, profile.efficiency.memory)
    return min(link, memory // min(ranks, network.devices_per_node))


def _network(profile: Profile) -> Network:
    if profile.network is None:
        raise InputError(
            f"{profile.name}: this profile has no network, which ranks need; choose one of "
            f"{', '.join(name for name in NAMES if load_profile(name).network)}, or write a `network` into its file"
        )
    return profile.network


def copy_ns(size_bytes: int, device: Profile | CopyRates) -> int:
    """What a copy within the device's memory takes: each byte is read and written."""
    if isinstance(device, CopyRates):
        return round(2e9 * size_bytes / device.memory_bytes_per_s)
    return round(2e9 * size_bytes / (device.memory_bandwidth_bytes_per_s * device.efficiency.memory))


def mirror_ns(size_bytes: int, profile: Profile, ranks: int) -> int | None:
    """What another node is sent so many bytes in, with nothing else on this device's share of the network; None where
    there is no other, or that is not known."""
    network = profile.network
    if network is None or ranks <= network.devices_per_node:
        return None
    return _duration_ns(size_bytes, network.between_nodes_bytes_per_s)


def host_update_ns(size_bytes: int, device: Profile) -> int | None:
    """What the host takes to update a replica of so many bytes, with its share of the node's memory; None: not known.

    As measured of AdamW: six and a half copies of the state, each of which reads and writes it.
    """
    network = device.network
    if network is None:
        return None
    share = network.host_memory_bandwidth_bytes_per_s / network.devices_per_node * device.efficiency.memory
    return round(UPDATE_PASSES * size_bytes * 1e9 / share)


def _reached(nominal: int, efficiency: float) -> int:
    return max(1, round(nominal * efficiency))


def _duration_ns(amount: int, per_s: int) -> int:
    return -(-amount * 1_000_000_000 // per_s)
