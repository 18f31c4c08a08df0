"""What each part is said to buy is what plans with and without it need."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from evaluation.ablation import links, parts, prices, slack
from evaluation.ablation.freelink import free_link
from evaluation.ablation.study import NOT_CYCLIC, PARTS, Study, ablate, cells_of, study
from evaluation.ablation.windows import read_after_iteration
from handmade import GRAPH
from matplotlib.patches import Rectangle

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.lower import anchor_grid
from checkflow.plan import Plan, Reason, problem_of
from checkflow.plan.solve import solve
from checkflow.plan.streaming.place import place

ROOT = Path(__file__).parent.parent.parent
BANDWIDTH = 63 * 10**9
ALEXNET = read_graph(ROOT / "graphs" / "alexnet-1.json")
WAYS = {name for name, *_ in links.WAYS}
CASES: dict[str, tuple[Graph, int]] = {"alexnet-1": (ALEXNET, BANDWIDTH), "handmade": (GRAPH, 8 * 10**9)}


@pytest.fixture(scope="module")
def alexnet() -> Study:
    rows = tuple(ablate(ALEXNET, part, BANDWIDTH, 1.0, "alexnet/1 sgd") for part in (*PARTS, NOT_CYCLIC))
    return Study("alexnet/1 sgd", ALEXNET, rows, free_link(ALEXNET, "alexnet/1 sgd"))


def test_each_part_never_costs_memory(alexnet: Study) -> None:
    """With one part more the plan needs no more, up to the granule, and copies no more."""
    planned = [alexnet.row(part) for part in PARTS]
    for before, after in pairwise(planned):
        assert after.added_bytes <= before.added_bytes * (1 + before.gap) + 512
        assert after.snapshot_bytes <= before.snapshot_bytes
    assert planned[0].snapshot_bytes == planned[0].state_bytes
    assert planned[-1].transfers < planned[0].transfers


def test_without_cyclic_windows_nothing_leaves_before_the_iterations_end() -> None:
    """The handmade graph's b is last written at step 1: its window opens there, or, closed, at position 0."""
    whole = problem_of(GRAPH, bandwidth_bytes_per_s=CASES["handmade"][1], interval=2)
    plans = [solve(problem) for problem in (whole, read_after_iteration(whole))]
    starts = [min(t.start for t in plan.transfers) for plan in plans if isinstance(plan, Plan)]
    assert starts[0] < 1 <= starts[1]
    rows = {part.name: ablate(GRAPH, part, CASES["handmade"][1], 1.0) for part in (PARTS[-1], NOT_CYCLIC)}
    assert rows[PARTS[-1].name].snapshot_bytes < rows[NOT_CYCLIC.name].snapshot_bytes


def test_a_cell_that_the_paper_cannot_plan_is_refused() -> None:
    """The handmade graph writes at step 1, before the paper's model allows a snapshot."""
    with pytest.raises(InputError, match=r"the paper's optimum: infeasible at interval .* \(deadline\)"):
        ablate(GRAPH, PARTS[0], CASES["handmade"][1], 1.0)
    assert free_link(GRAPH).paper_bytes_per_s is None


@pytest.mark.parametrize("case", CASES)
def test_a_free_link_adds_no_byte_and_a_slower_one_does(case: str) -> None:
    """As planned and as executed: at the bandwidth found, and at 2% less where that can carry the state at all."""
    graph, _ = CASES[case]
    free = free_link(graph)
    for planned, rate in ((True, free.planned_bytes_per_s), (False, free.executed_bytes_per_s)):
        if rate is None:
            continue
        assert _added(graph, rate, planned=planned) <= 512
        slower = rate * 98 // 100
        assert slower < free.any_bytes_per_s or _added(graph, slower, planned=planned) > 0


def _added(graph: Graph, bandwidth_bytes_per_s: int, *, planned: bool) -> int:
    problem = problem_of(graph, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    if planned:
        plan = solve(problem)
        assert isinstance(plan, Plan)
        return plan.peak_bytes - problem.training_peak_bytes
    return place(anchor_grid(problem, graph)).peak_bytes - problem.training_peak_bytes


def test_a_study_is_of_each_cell_in_order(alexnet: Study) -> None:
    """Processes give what this one gives; a graph file is a model like any other."""
    found = study([(str(ROOT / "graphs" / "alexnet-1.json"), ())], device="rtx3090", bandwidth_bytes_per_s=BANDWIDTH)
    assert [each.cell for each in found] == ["alexnet"]
    assert replace(found[0].row(PARTS[-1]), cell="", plan_s=0) == replace(alexnet.row(PARTS[-1]), cell="", plan_s=0)
    assert cells_of(("vgg",), (1,), ("sgd",)) == (("vgg", (("batch_size", "1"), ("optimizer", "sgd"))),)


def test_pictures_show_the_rows(alexnet: Study) -> None:
    """The bytes added are in the tiles, the median of one cell is that cell, and a free link is at its bandwidth."""
    tiles = [text.get_text() for text in parts.draw_added([alexnet]).axes[0].texts]
    executed = alexnet.row(PARTS[-1]).executed_added_bytes or 0
    assert tiles == [f"{added / 2**20:.0f}" for added in (*(alexnet.row(part).added_bytes for part in PARTS), executed)]
    transfers = parts.draw_parts([alexnet]).axes[1].texts
    assert [text.get_text() for text in transfers] == [str(alexnet.row(part).transfers) for part in PARTS]
    free = links.draw_free([alexnet], ("sgd",)).axes[0]
    shown = {str(line.get_label()): np.asarray(line.get_xdata())[0] for line in free.lines if line.get_label() in WAYS}
    assert shown == {name: rate / 1e9 for name, rate in _rates(alexnet).items()}
    bar = links.draw_in_backward([alexnet], [alexnet]).axes[0].patches[0]
    assert isinstance(bar, Rectangle)
    assert bar.get_height() == 100 * executed / alexnet.rows[0].state_bytes


def _rates(each: Study) -> dict[str, int]:
    return {name: rate for name, _, _, _, rate_of in links.WAYS if (rate := rate_of(each.free)) is not None}


def test_the_summary_is_the_difference_of_neighbours(alexnet: Study) -> None:
    """Of one cell, median and most are the same: what a part saves over the parts before it."""
    table = parts.summary([alexnet])
    before, direct = (alexnet.row(part) for part in PARTS[:2])
    saved = f"{(before.added_bytes - direct.added_bytes) / 2**20:.1f}"
    assert table.rows[0][:3] == ("+ direct offload", saved, saved)
    assert table.rows[-1][0] == "as executed"


def test_slack_keeps_its_promise_in_the_picture() -> None:
    """No stall up to the slack, one beyond what the plan tolerates; and each slack's price is drawn."""
    graph, options = read_graph(ROOT / "graphs" / "alexnet-32.json"), Options(40 * 10**9, interval=None)
    curves = slack.stalls(graph, options, (0.0, 0.2))
    for promised, drifted in curves.items():
        assert all(each.stalled == 0 for each in drifted if each.drift <= promised)
    assert curves[0.0][-1].mean_stall > curves[0.2][-1].mean_stall
    priced = prices.price_of_slack(graph, options, (0.0, 0.2), iterations=5)
    added = slack.draw("alexnet", priced, curves).axes[0].lines[0]
    made = compile_graph(graph, replace(options, slack_ppm=200_000))
    assert isinstance(made, Compiled)
    certificate = made.schedule.certificate
    assert np.asarray(added.get_ydata())[1] * 2**20 == certificate.peak_bytes - certificate.training_peak_bytes
    with pytest.raises(InputError, match=r"slack: 0\.9"):
        slack.stalls(graph, Options(40 * 10**9, interval=1), (0.9,))


def test_the_price_of_slack_is_what_compilation_says() -> None:
    """Each slack is a compilation; where none is found, the reason stands in its place."""
    graph = read_graph(ROOT / "graphs" / "resnet3d-1.json")
    bare, none = prices.price_of_slack(graph, Options(BANDWIDTH), (0.0, 0.1), spreads=(0.05, 0.4))
    made = compile_graph(graph, Options(BANDWIDTH, interval=None))
    assert isinstance(made, Compiled)
    assert bare.certificate == made.schedule.certificate
    assert (bare.tolerated_drift, bare.tolerated_random_drift) == (0.0, 0.0)
    assert (none.certificate, none.reason) == (None, Reason.BANDWIDTH)
    (paid,) = prices.price_of_slack(graph, Options(BANDWIDTH, interval=2), (0.1,), spreads=(0.05, 0.4))
    assert paid.certificate is not None
    assert paid.certificate.peak_bytes >= paid.certificate.training_peak_bytes
    assert (paid.interval, round(paid.tolerated_drift, 2), paid.tolerated_random_drift) == (2, 0.19, 0.05)
    assert {len(price.row) for price in (bare, none, paid)} == {len(prices.HEADINGS)}
