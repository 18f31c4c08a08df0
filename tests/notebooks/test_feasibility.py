"""What the maps and the frontier show is what the sweep found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from evaluation.feasibility import frontier, maps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from checkflow import hardware, sweep
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.sweep.evaluate import evaluate, failure
from checkflow.sweep.feasibility_edge import edge_of

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
PROFILE = hardware.load_profile("rtx3090")
BATCHES = ("1", "32")
RATES = (8, 64)  # GB/s


def graph_of(batch: str) -> Graph:
    return read_graph(GRAPHS / f"alexnet-{batch}.json")


def cell(batch: str, gigabytes_per_s: int | None = None, **fields: object) -> sweep.Cell:
    rate = None if gigabytes_per_s is None else gigabytes_per_s * 10**9
    settings = (("batch_size", batch), ("optimizer", "sgd"))
    plain = sweep.Cell(model="alexnet", settings=settings, device="rtx3090", interval=None, bandwidth_bytes_per_s=rate)
    return plain.model_copy(update=fields)


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.fixture(scope="module")
def rows() -> list[sweep.Row]:
    return [evaluate(cell(batch, rate), graph_of(batch), PROFILE) for batch in BATCHES for rate in RATES]


def test_the_interval_is_the_links_use_rounded_up(rows: list[sweep.Row]) -> None:
    """k = ⌈S / (B T)⌉, which is what link_use says."""
    assert {row.interval for row in rows} > {1}
    for row in rows:
        assert row.interval is not None
        assert row.interval - 1 < maps.link_use(row) <= row.interval


def test_a_tile_for_each_row_with_its_interval(rows: list[sweep.Row]) -> None:
    """Two batches and two bandwidths are four tiles that do not overlap, each around its own figure."""
    axes = maps.draw_bandwidths(rows, [_edge(batch) for batch in BATCHES]).axes[0]
    tiles = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(tiles) == len(rows)
    for tile, row in zip(tiles, rows, strict=True):
        batch, rate = int(maps.setting(row, "batch_size")), (row.bandwidth_bytes_per_s or 0) / 1e9
        assert tile.get_x() < batch < tile.get_x() + tile.get_width()
        assert tile.get_y() < rate < tile.get_y() + tile.get_height()
    assert [text for text in texts(axes) if text.isdigit()] == [str(row.interval) for row in rows]


def _edge(batch: str) -> sweep.Edge:
    found = sweep.Search(cell=cell(batch, interval=1), axis=sweep.Axis.BANDWIDTH)
    return edge_of(found, hardware.link_bytes_per_s(PROFILE), lambda asked: evaluate(asked, graph_of(batch), PROFILE))


def test_the_line_goes_through_the_edges(rows: list[sweep.Row]) -> None:
    """At the drawn bandwidth k = 1 is feasible, and with 1 B/s less it is not."""
    axes = maps.draw_bandwidths(rows, [_edge(batch) for batch in BATCHES]).axes[0]
    line = next(line for line in axes.lines if line.get_linewidth() == 3)
    for batch, at in zip(BATCHES, np.asarray(line.get_ydata()), strict=True):
        rate = round(at * 1e9)
        asked = cell(batch, interval=1)
        outcomes = [
            evaluate(asked.model_copy(update={"bandwidth_bytes_per_s": least}), graph_of(batch), PROFILE).feasible
            for least in (rate, rate - 1)
        ]
        assert outcomes == [True, False]


def test_what_exceeds_the_devices_memory_is_hatched() -> None:
    """The same cell on a device with a mebibyte of memory, beside one with enough."""
    small = PROFILE.model_copy(update={"memory_bytes": 2**20})
    enough, too_little = (evaluate(cell("1"), graph_of("1"), profile) for profile in (PROFILE, small))
    too_little = too_little.model_copy(update={"cell": cell("1", device="small")})
    figure = maps.draw_devices([enough, too_little])
    hatched = [bool(patch.get_hatch()) for patch in figure.axes[0].patches]
    assert hatched == [False, True]
    assert "more memory than the device has" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert f"{maps.link_use(enough):.0%}" in texts(figure.axes[0])


def test_a_failed_cell_is_told_and_not_drawn() -> None:
    """Its message is in the error."""
    with pytest.raises(InputError, match=r"alexnet/1: .*ran out"):
        maps.draw_devices([failure(cell("1"), "memory ran out")])


@pytest.fixture(scope="module")
def tried() -> list[sweep.Row]:
    """Every policy at intervals below and above the smallest that works at 8 GB/s."""
    return [
        evaluate(cell("1", 8, policy=policy, interval=interval), graph_of("1"), PROFILE)
        for policy in frontier.LOOKS
        for interval in (1, 14, 20)
    ]


def test_the_frontier_has_a_point_for_each_plan(tried: list[sweep.Row]) -> None:
    """Memory added and slowdown of each row with a plan, at its own place."""
    axes = frontier.draw(tried).axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    for policy, (name, _, _) in frontier.LOOKS.items():
        here = [row for row in tried if row.cell.policy == policy and row.feasible]
        points = [(((row.peak_bytes or 0) - (row.training_peak_bytes or 0)) / 2**20, row.overhead) for row in here]
        drawn = np.asarray(lines[name].get_xydata())
        assert [tuple(point) for point in drawn] == points
    assert "checkflow: none at k <= 1" in axes.get_title(loc="left")


def test_the_table_says_why_there_is_no_plan(tried: list[sweep.Row]) -> None:
    """Each row has all columns; refused ones have the reason, the others what is added."""
    table = frontier.table(tried)
    assert all(len(line) == len(frontier.HEADINGS) for line in table)
    assert table[0][:3] == ("checkflow", "1", "infeasible (bandwidth)")
    assert table[1][3] and table[4][3] and not table[0][3]
