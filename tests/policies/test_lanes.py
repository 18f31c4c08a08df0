"""Lanes that are asked for: more of them send less in an iteration, and have more to make again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import checkflow
from checkflow.compiler import Compiled, Options, Refused, compile_graph
from checkflow.graph import Graph
from checkflow.graphfile import read_graph

OPTIONS = Options(63 * 10**9, policy="rolling")


@pytest.fixture(scope="module")
def alexnet() -> Graph:
    return read_graph(Path(__file__).parents[2] / "graphs" / "alexnet-1.json")


@pytest.fixture(scope="module")
def adamw() -> Graph:
    return traced("adamw")


def traced(optimizer: str) -> Graph:
    from checkflow import hardware, models
    from checkflow.trace import trace_training

    made = trace_training(lambda: models.factory("transformer")(batch_size=1, optimizer=optimizer), model="transformer")
    return hardware.retime(made.graph, hardware.load_profile("rtx3090"))


@pytest.mark.parametrize("policy", ["rolling", "lowdiff"])
def test_more_of_them_send_less_and_take_longer_to_restore(policy: str, adamw: Graph) -> None:
    """P + 2P/K bytes of AdamW's 3P in an iteration; even where the link carries the whole."""
    found = [compile_graph(adamw, replace(OPTIONS, policy=policy, lanes=lanes)) for lanes in (2, 3, 6)]
    schedules = [each.schedule for each in found if isinstance(each, Compiled)]
    assert [schedule.lanes for schedule in schedules] == [2, 3, 6]
    sent = [sum(action.bytes for action in schedule.actions) / schedule.lanes for schedule in schedules]
    for schedule, size_bytes in zip(schedules, sent, strict=True):
        assert size_bytes == pytest.approx(schedule.state_bytes * (1 + 2 / schedule.lanes) / 3, rel=0.02)
    replays = [schedule.certificate.replay_ns for schedule in schedules]
    assert replays == sorted(replays) and len(set(replays)) == 3


def test_too_slow_a_link_for_them_is_refused_with_one_that_is_not(alexnet: Graph) -> None:
    slow = compile_graph(alexnet, replace(OPTIONS, bandwidth_bytes_per_s=10**9, lanes=2))
    assert isinstance(slow, Refused) and slow.answer.smallest_interval is None
    needed = slow.answer.needed_bandwidth_bytes_per_s
    assert needed is not None
    assert isinstance(compile_graph(alexnet, replace(OPTIONS, bandwidth_bytes_per_s=needed, lanes=2)), Compiled)


@pytest.mark.parametrize(
    ("policy", "lanes", "interval", "said"),
    [
        ("checkflow", 2, 1, "policy checkflow has no lanes; use --policy rolling or lowdiff"),
        ("auto", 2, 1, "policy auto has no lanes"),
        ("rolling", 1, 1, "is not from 2 to 16"),
        ("rolling", 17, 1, "is not from 2 to 16"),
        ("lowdiff", 2, 3, "leave out --interval 3"),
    ],
)
def test_what_does_not_go_with_them_is_told(policy: str, lanes: int, interval: int, said: str, alexnet: Graph) -> None:
    mtbf = "3h" if policy == "auto" else None
    with pytest.raises(checkflow.InputError, match=said):
        checkflow.compile(alexnet, policy=policy, lanes=lanes, interval=interval, mtbf=mtbf)


def test_state_that_no_gradient_rebuilds_has_none(alexnet: Graph) -> None:
    tensors = tuple(replace(tensor, of="") for tensor in alexnet.tensors)
    with pytest.raises(checkflow.InputError, match="--lanes 2: no gradient rebuilds any of this state"):
        compile_graph(replace(alexnet, tensors=tensors), replace(OPTIONS, lanes=2))
