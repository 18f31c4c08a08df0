"""Lanes that are asked for: more of them send less in an iteration, and have more to make again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import checkflow
from checkflow.compiler import Compiled, Options, Refused, compile_graph
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.plan import Plan, Problem, on_anchors, problem_of
from checkflow.plan.rebuilt import in_lanes
from checkflow.plan.streaming.planner import construct_streaming

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
        ("checkflow", 2, 1, "policy checkflow has no lanes; use policy='rolling' or lowdiff"),
        ("auto", 2, 1, "policy auto has no lanes"),
        ("rolling", 1, 1, "is not from 2 to 16"),
        ("rolling", 17, 1, "is not from 2 to 16"),
        ("lowdiff", 2, 3, "leave out interval=3"),
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


@pytest.mark.parametrize("policy", ["rolling", "lowdiff"])
def test_factors_leave_where_they_spare_memory(policy: str, adamw: Graph) -> None:
    """And nowhere else: where gradients add nothing to the peak they leave as they are."""
    base, spared = policy == "lowdiff", 0
    size_bytes = sum(adamw.tensors[index].size_bytes for index in adamw.written_state)
    for share in (0.38, 0.4, 0.45, 0.55, 0.7, 0.85):  # of the state, that the link carries in an iteration
        bandwidth = round(size_bytes * share * 1e9 / adamw.iteration_time_ns)
        compiled = compile_graph(adamw, replace(OPTIONS, policy=policy, bandwidth_bytes_per_s=bandwidth))
        problem = on_anchors(problem_of(adamw, bandwidth_bytes_per_s=bandwidth), adamw)
        whole, factored = (
            [plan.peak_bytes for plan in (_plan(problem, adamw, n, base, factors) for n in range(2, 17)) if plan]
            for factors in (False, True)
        )
        if not isinstance(compiled, Compiled):
            assert not whole and not factored
            continue
        peak = compiled.schedule.certificate.peak_bytes
        if any(row.factor_rows for row in compiled.schedule.gradients):
            spared += bool(whole)
            assert not whole or peak < whole[0]
            without = compile_graph(
                adamw, replace(OPTIONS, policy=policy, bandwidth_bytes_per_s=bandwidth, factors=False)
            )
            assert isinstance(without, Compiled) == bool(whole)
            if isinstance(without, Compiled):
                assert not any(row.factor_rows for row in without.schedule.gradients)
        else:
            assert peak == adamw.training_peak_bytes or not factored or peak <= factored[0]
    assert spared


def _plan(problem: Problem, graph: Graph, lanes: int, base: bool, factors: bool) -> Plan | None:
    laned = in_lanes(problem, graph, lanes, base=base, factors=factors)
    return None if laned is None else construct_streaming(laned)
