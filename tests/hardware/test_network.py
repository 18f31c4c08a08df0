"""Collectives: what they take over a network whose figures are round, and what is waited for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from checkflow import hardware
from checkflow.errors import FormatError, InputError
from checkflow.graph import Collective, CollectiveKind, Graph, Op, Role, Tensor
from checkflow.hardware.network import collective_ns, overlapped
from checkflow.hardware.profile import Network

KIND = CollectiveKind
# A byte takes 1 ns within a node of four devices, and 4 ns by the adapter that each has.
ROUND = Network(
    devices_per_node=4,
    within_node_bytes_per_s=10**9,
    between_nodes_bytes_per_s=250_000_000,
    within_node_ns=10,
    between_nodes_ns=100,
    host_memory_bandwidth_bytes_per_s=10**9,
)


@pytest.mark.parametrize(
    ("collective", "expected_ns"),
    [
        (Collective(KIND.ALL_GATHER, 4000, 4, 1), 3000 + 3 * 10),
        (Collective(KIND.REDUCE_SCATTER, 4000, 4, 1), 3000 + 3 * 10),
        (Collective(KIND.ALL_REDUCE, 4000, 4, 1), 2 * (3000 + 3 * 10)),
        (Collective(KIND.ROOTED, 4000, 2, 1), 2000 + 10),
        (Collective(KIND.BARRIER, 0, 4, 1), 3 * 10),
        (Collective(KIND.BETWEEN_TWO, 4000, 2, 1), 4000),
        (Collective(KIND.ALL_GATHER, 4000, 1, 1), 0),
        # Four adapters of a node are as fast as its devices: seven of eight parts, six messages within, one between.
        (Collective(KIND.ALL_GATHER, 8000, 8, 1), 7000 + 6 * 10 + 100),
        # Two of each node, and so two adapters: half as fast.
        (Collective(KIND.ALL_GATHER, 4000, 4, 2), 2 * 3000 + 2 * 10 + 100),
        # One of each node, by one adapter.
        (Collective(KIND.ALL_GATHER, 4000, 4, 4), 4 * 3000 + 3 * 100),
        (Collective(KIND.ALL_GATHER, 4000, 4, 8), 4 * 3000 + 3 * 100),
        # Half of it goes to the other node, each rank's share by its own adapter.
        (Collective(KIND.ALL_TO_ALL, 8000, 8, 1), 4 * 4000 + 100),
        (Collective(KIND.ALL_TO_ALL, 4000, 4, 1), 3000 + 10),
    ],
)
def test_a_ring_by_hand(collective: Collective, expected_ns: int) -> None:
    """(p - 1) / p of the bytes at the narrowest place, and a latency for each message."""
    assert collective_ns(collective, ROUND) == expected_ns


def op(reads: tuple[int, ...], writes: tuple[int, ...], group: int = 0) -> Op:
    """An operator, or a collective of so many ranks."""
    collective = Collective(KIND.ALL_GATHER, 1, group, 1) if group else None
    return Op("op", reads, writes, 0, 0, "float32", 0, collective)


def times(ops: list[Op], alone: list[int]) -> list[int]:
    """Of operators on ten tensors, of which the first two are state."""
    state = (Tensor("p", Role.PARAMETER, 1, 0, len(ops)), Tensor("q", Role.OPTIMIZER, 1, 0, len(ops)))
    others = tuple(Tensor(f"{i}", Role.ACTIVATION, 1, 0, len(ops)) for i in range(2, 10))
    return overlapped(Graph("m", (), "", "cpu", tuple(ops), (*state, *others), ()), alone)


def test_what_uses_a_result_waits_for_the_rest_of_it() -> None:
    """7 ns of a gradient's sum are hidden by an operator that does not need it, 3 are not."""
    ops = [op((9,), (4,)), op((4,), (2,), group=8), op((4,), (3,)), op((2, 3), (0,))]
    assert times(ops, [5, 10, 7, 2]) == [5, 0, 7, 3 + 2]


def test_a_group_does_one_after_the_other_and_groups_run_side_by_side() -> None:
    ops = [op((9,), (6,)), op((6,), (2,), group=8), op((6,), (3,), group=8), op((6,), (4,), group=2), op((3, 4), (5,))]
    assert times(ops, [5, 10, 10, 15, 1]) == [5, 0, 0, 0, 20 + 1]


def test_what_follows_from_state_alone_is_prefetched() -> None:
    """A layer's parameters are gathered while the layer before computes, though their copy stands behind it."""
    gathered = [op((0,), (2,)), op((2,), (2,), group=8), op((2, 9), (3,)), op((1,), (4,)), op((4,), (4,), group=8)]
    ops = [*gathered, op((3, 4), (5,)), op((5,), (0, 1))]
    first, _, waits, _, _, second, _ = times(ops, [1, 6, 20, 1, 6, 20, 1])
    assert (first, waits) == (1, 6 + 20)
    assert second == 20  # the second is there at 13, the first layer's output at 27
    assert times([*ops, op((0,), (6,), group=8)], [1, 6, 20, 1, 6, 20, 1, 9])[-1] == 9  # not what is written by then


def test_an_iteration_ends_when_its_last_collective_has() -> None:
    """State that it has written is not gathered before it is; what nobody waits for counts at the end."""
    ops = [op((9,), (4,)), op((4,), (0,)), op((0,), (2,), group=8), op((4,), (3,))]
    assert times(ops, [5, 5, 10, 4]) == [5, 5, 0, 4 + 6]
    assert times([], []) == []


def test_no_collective_makes_an_iteration_shorter_or_longer_than_it_can_be() -> None:
    """Between all side by side and all one after the other."""
    ops = [op((9,), (6,)), op((6,), (2,), group=8), op((2,), (3,)), op((3,), (4,), group=4), op((4,), (5,))]
    alone = [3, 9, 4, 2, 6]
    assert max(3 + 4 + 6, 9 + 2) <= sum(times(ops, alone)) <= sum(alone)
    assert sum(times(ops, alone)) == sum(alone)  # each needs the one before


# Profiles


def graph(*ops: Op, ranks: int = 8) -> Graph:
    return Graph("m", (), "", "cpu", ops, (), (), world_size=ranks)


def test_retimed_collectives_are_the_networks(tmp_path: Path) -> None:
    """The time stands where it is waited for."""
    profile = hardware.load_profile("h100").model_copy(update={"name": "mine", "network": ROUND})
    timed = hardware.retime(
        graph(Op("c", (0,), (1,), 0, 9, "float32", 0, Collective(KIND.ALL_GATHER, 4000, 4, 1))), profile
    )
    assert [each.time_ns for each in timed.ops] == [3030]
    path = tmp_path / "p.yaml"
    hardware.write_profile(path, profile)
    assert hardware.load_profile(str(path)) == profile


def test_a_profile_without_a_network_says_so_where_ranks_need_one(tmp_path: Path) -> None:
    """One that was written before there were networks is read as ever."""
    old = hardware.load_profile("h100").model_copy(update={"name": "mine", "network": None})
    path = tmp_path / "old.yaml"
    hardware.write_profile(path, old)
    assert "network" not in yaml.safe_load(path.read_text())
    assert hardware.load_profile(str(path)) == old
    alone = graph(Op("c", (0,), (1,), 0, 8, "float32", 0, Collective(KIND.ALL_REDUCE, 8, 1, 1)), ranks=1)
    hardware.retime(alone, old)
    together = graph(Op("c", (0,), (1,), 0, 8, "float32", 0, Collective(KIND.ALL_REDUCE, 8, 2, 1)))
    for needs in (lambda: hardware.retime(together, old), lambda: hardware.link_bytes_per_s(old, 2)):
        with pytest.raises(
            InputError, match="mine: this profile has no network, which ranks need; choose one of a100-4"
        ):
            needs()


def test_a_network_has_all_its_figures(tmp_path: Path) -> None:
    document = hardware.load_profile("h100").model_dump()
    del document["network"]["between_nodes_ns"]
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(FormatError, match="between_nodes_ns"):
        hardware.load_profile(str(path))


def test_a_nodes_links_share_its_host_memory() -> None:
    """A link has its own rate, or its share of 0.8 GB/s: of two ranks a half, of eight on two nodes a quarter."""
    profile = hardware.load_profile("h100").model_copy(
        update={"network": ROUND, "link_bandwidth_bytes_per_s": 375_000_000}  # 300 MB/s are reached
    )
    assert [hardware.link_bytes_per_s(profile, ranks) for ranks in (1, 2, 4, 8)] == [3 * 10**8] * 2 + [2 * 10**8] * 2


@pytest.mark.parametrize("name", ["a100-40gb", "a100-80gb", "h100", "h200"])
def test_a_bundled_nodes_memory_keeps_up_with_its_links(name: str) -> None:
    profile = hardware.load_profile(name)
    assert hardware.link_bytes_per_s(profile, 1024) == hardware.link_bytes_per_s(profile)
