"""What an infeasible answer says would do, does: each option it names is given to the compiler, by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from drawn import graphs
from hypothesis import event, given, settings
from hypothesis import strategies as st

from checkflow.compiler import Compiled, Options, Refused, compile_graph, explain
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.plan import Formulation, Plan, Problem, StateTensor, Transfers
from checkflow.plan.solve import solve
from checkflow.units import parse_bytes, parse_rate

KIB = 1024
GRAPHS = Path(__file__).parents[1] / "graphs"
KINDS = [
    (Formulation.DIRECT, Transfers.STREAMING),
    (Formulation.DIRECT, Transfers.PACKED),
    (Formulation.COMPACT, Transfers.PACKED),
    (Formulation.PAPER, Transfers.PACKED),
]


def advised(refused: Refused, options: Options) -> dict[str, Options]:
    """The options of each way out that the answer names."""
    text = explain(refused)
    _, _, would_do = text.partition("; what would do: ")
    # What the options of this search had was not enough: no other interval and limit than the refused problem's.
    tried = replace(options, interval=refused.problem.interval, memory_limit_bytes=refused.problem.memory_limit_bytes)
    found = {}
    for name, value in re.findall(r"--([a-z-]+)(?: ([\w.]+(?:/s)?))?", would_do):
        match name:
            case "bandwidth":
                found[name] = replace(tried, bandwidth_bytes_per_s=parse_rate(value))
            case "interval":
                found[name] = replace(tried, interval=int(value))
            case "memory-limit":
                found[name] = replace(tried, memory_limit_bytes=parse_bytes(value))
            case "relax-memory":
                found[name] = replace(tried, relax_memory=True)
            case "formulation":
                found[name] = replace(tried, formulation=Formulation(value), transfers=None)
            case "transfers":
                found[name] = replace(tried, transfers=Transfers(value))
    return found


def check(graph: Graph, options: Options) -> int:
    """How many ways out were named, each of which worked and was none already taken."""
    result = compile_graph(graph, options)
    if isinstance(result, Compiled):
        return 0
    answer, ways = result.answer, advised(result, options)
    for name, changed in ways.items():
        assert changed != options, name
        made = compile_graph(graph, changed)
        assert isinstance(made, Compiled), (name, explain(result), explain(made))
    if answer.needed_bandwidth_bytes_per_s is not None:
        tried = replace(options, interval=result.problem.interval, memory_limit_bytes=result.problem.memory_limit_bytes)
        exact = replace(tried, bandwidth_bytes_per_s=answer.needed_bandwidth_bytes_per_s)
        assert isinstance(compile_graph(graph, exact), Compiled)
    return len(ways)


@pytest.mark.parametrize(("formulation", "transfers"), KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_what_would_do_does(formulation: Formulation, transfers: Transfers, data: st.DataObject) -> None:
    """Random graphs on links that are too slow, under memory limits, with slack, chunks and intervals."""
    drawn = data.draw(graphs(1 if formulation is Formulation.DIRECT else 2))
    scale = data.draw(st.sampled_from((KIB, 1500)))
    graph = replace(
        drawn,
        ops=tuple(replace(op, time_ns=op.time_ns * KIB) for op in drawn.ops),
        tensors=tuple(
            replace(t, size_bytes=t.size_bytes * scale, views=tuple(replace(v, shape=(scale,)) for v in t.views))
            for t in drawn.tensors
        ),
    )
    state_bytes = sum(graph.tensors[i].size_bytes for i in graph.written_state)
    least = -(-state_bytes * 10**9 // graph.iteration_time_ns)
    options = Options(
        bandwidth_bytes_per_s=max(1, least * data.draw(st.sampled_from((3, 9, 10, 11, 15, 40))) // 10),
        interval=data.draw(st.sampled_from((1, 1, 2))),
        chunk_bytes=data.draw(st.sampled_from((None, 8 * KIB))) if formulation is not Formulation.PAPER else 10 * KIB,
        memory_limit_bytes=data.draw(
            st.none()
            | st.integers(-2, 12).map(lambda part: max(1, graph.training_peak_bytes + part * state_bytes // 9))
        ),
        slack_ppm=data.draw(st.sampled_from((0, 100_000))),
        formulation=formulation,
        transfers=transfers,
        solver="highs",
        time_limit_s=20.0,
    )
    event(f"ways out: {check(graph, options)}")


@pytest.mark.parametrize(("network", "short"), [("alexnet-1", 150), ("resnet-1", 28)])
@pytest.mark.parametrize(("formulation", "transfers"), KINDS[:3])
@pytest.mark.parametrize("limited", [False, True])
def test_what_would_do_does_for_real_networks(
    network: str, short: int, formulation: Formulation, transfers: Transfers, limited: bool
) -> None:
    """A link of 20 GB/s is too slow for each every iteration; at so many more training's own peak is too low a limit.

    What is advised was constructed, so it does however little time a solver has.
    """
    graph = read_graph(GRAPHS / f"{network}.json")
    options = Options(20 * 10**9, formulation=formulation, transfers=transfers, time_limit_s=0.3)
    if limited:
        options = replace(options, bandwidth_bytes_per_s=short * 10**9, memory_limit_bytes=graph.training_peak_bytes)
    assert check(graph, options) > 0


@pytest.mark.parametrize("formulation", [Formulation.PAPER, Formulation.COMPACT])
def test_solve_plans_what_it_is_asked_for(formulation: Formulation) -> None:
    """Without a word on transfers each formulation has its own; none is answered with a plan of another."""
    problem = Problem((10, 10, 10), (5, 5, 5), (StateTensor(0, "w", 10, 3, 3),), 10**9, granule_bytes=1)
    plan = solve(problem, formulation)
    assert isinstance(plan, Plan)
    assert (plan.formulation, plan.transfers_kind) == (formulation, Transfers.PACKED)
