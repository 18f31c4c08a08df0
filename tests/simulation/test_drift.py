"""How much drift a plan stands."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.plan import PPM, problem_of
from checkflow.simulation import drift
from checkflow.simulation.drift import Noise, tolerated, tolerated_drift_ppm, under_random_drift, under_uniform_drift
from checkflow.simulation.simulate import simulate

GRAPHS = Path(__file__).parents[2] / "graphs"
BANDWIDTH = 63_000_000_000


@cache
def graph_named(name: str) -> Graph:
    return read_graph(GRAPHS / f"{name}.json")


@cache
def compiled(name: str, slack_ppm: int) -> Compiled:
    result = compile_graph(graph_named(name), Options(BANDWIDTH, interval=None, slack_ppm=slack_ppm))
    assert isinstance(result, Compiled)
    return result


def stalls(made: Compiled, bandwidth_bytes_per_s: int) -> bool:
    """Whether anything waits on another link, in any of many iterations."""
    problem = problem_of(made.graph, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    simulated = simulate(made.schedule, problem, [problem.time_ns] * 60)
    return bool(simulated.stall_ns_by_cause)


@pytest.mark.parametrize("name", ["alexnet-1", "bert-1", "resnet-1", "resnet3d-1", "transformer-32", "vgg-1", "vit-1"])
@pytest.mark.parametrize("slack_ppm", [0, 50_000, 300_000])
def test_a_plan_with_slack_stands_as_much_uniform_drift(name: str, slack_ppm: int) -> None:
    """Operators and link together, also at random; and beyond what is tolerated, something waits."""
    made = compiled(name, slack_ppm)
    (within,) = under_uniform_drift(made.schedule, made.graph, [slack_ppm / PPM])
    assert within.stalled == 0
    (noisy,) = under_random_drift(made.schedule, made.graph, [slack_ppm / PPM])
    assert noisy.stalled == 0
    ppm = tolerated_drift_ppm(made.schedule, made.graph)
    assert ppm >= 1 - (1 - slack_ppm / PPM) ** 2
    assert not stalls(made, BANDWIDTH * (PPM - ppm) // PPM)
    assert stalls(made, BANDWIDTH * (PPM - ppm - 2000) // PPM)


def test_random_drift_is_drawn_anew_and_can_be_repeated() -> None:
    """The same seed gives the same answer, another seed another one, and without drift nothing waits."""
    made = compiled("vit-1", 0)
    none, some, much = under_random_drift(made.schedule, made.graph, [0, 0.1, 0.5])
    assert (none.stalled, none.longest_stall) == (0, 0)
    assert 0 < some.stalled < some.iterations == 200
    assert 0 < some.mean_stall < much.mean_stall
    assert some.median_stall <= some.p99_stall <= some.longest_stall < much.longest_stall
    assert (none, some, much) == under_random_drift(made.schedule, made.graph, [0, 0.1, 0.5])
    assert (some,) != under_random_drift(made.schedule, made.graph, [0.1], seed=1)


@pytest.mark.parametrize("noise", Noise)
def test_independent_operators_drift_far_less_than_all_together(noise: Noise) -> None:
    """Hundreds of independent factors average out; a plan without slack still stalls where it meets its deadlines."""
    made = compiled("vit-1", 100_000)
    alone = under_random_drift(made.schedule, made.graph, [0.15], noise=noise, link=False)
    (together,) = under_uniform_drift(made.schedule, made.graph, [0.15])
    assert tolerated(alone) == 0.15
    assert together.stalled == together.iterations
    bare = compiled("resnet3d-1", 0)
    assert tolerated(under_random_drift(bare.schedule, bare.graph, noise=noise, link=False)) == 0


def test_a_row_has_a_cell_for_each_heading() -> None:
    made = compiled("resnet3d-1", 0)
    assert len(under_uniform_drift(made.schedule, made.graph, [0.1])[0].row) == len(drift.HEADINGS)


def test_a_drift_out_of_range_is_refused() -> None:
    """Times would be negative, or the link would stand still."""
    made = compiled("transformer-32", 0)
    with pytest.raises(InputError, match=r"drift: 1\.5"):
        under_random_drift(made.schedule, made.graph, [1.5])
    with pytest.raises(InputError, match=r"drift: 1\.0"):
        under_uniform_drift(made.schedule, made.graph, [1.0])
