"""The evaluation's figures are those of the plans, and its explanations come out when they are tried."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from evaluation.paper import bars, chunks, disk, drift, feasibility, peaks
from evaluation.table import Table

from checkflow import sweep
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.plan import Formulation, Transfers, problem_of
from checkflow.policies import checkfreq

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
LINK = 63_000_000_000
MIB = 1 << 20


@cache
def _graph(name: str) -> Graph:
    return read_graph(GRAPHS / f"{name}.json")


@cache
def _rows(interval: int | None = None) -> tuple[sweep.Row, ...]:
    """AlexNet at batch 1 and 32, ours at 63 GB/s."""
    models = tuple(str(GRAPHS / f"alexnet-{batch}.json") for batch in (1, 32))
    grid = sweep.Grid(models=models, intervals=(interval,), bandwidths_bytes_per_s=(LINK,))
    return sweep.run(grid, jobs=1)


def test_peaks_are_those_of_the_plans() -> None:
    """Each scheme's peak is what its own plan has, at the interval that the link carries."""
    for found in peaks.peaks_of(_rows()):
        graph = _graph(f"{found.network}-{found.batch}")
        made = compile_graph(graph, Options(LINK, interval=found.interval))
        assert isinstance(made, Compiled)
        at_best = checkfreq.at_best(problem_of(graph, bandwidth_bytes_per_s=LINK))
        certificate = made.schedule.certificate
        assert found.executed_bytes == certificate.peak_bytes
        assert found.training_bytes == graph.training_peak_bytes
        assert found.checkfreq_bytes == at_best.peak_bytes <= found.held_bytes
        assert 0 < found.saving <= found.held_saving <= 1 / 3  # the parameters and a gradient each are the least
    assert [found.interval for found in peaks.peaks_of(_rows())] == [2, 1]


def test_a_cell_without_a_plan_has_no_peaks() -> None:
    """AlexNet at batch 1 is not feasible at every iteration, and is not drawn as if it were."""
    with pytest.raises(ValueError, match="has no peaks"):
        peaks.peaks_of(_rows(1))


def test_schemes_are_compared_at_one_interval() -> None:
    """A row of another interval is refused."""
    other = [row.model_copy(update={"interval": 7}) for row in _rows()]
    with pytest.raises(ValueError, match="of interval 7, ours of 2"):
        peaks.peaks_of(_rows(), other)


def test_bars_stand_for_the_peaks() -> None:
    """The added bytes drawn are those of the plans: two of three bars where the paper's optimum is not given."""
    small, large = peaks.peaks_of(_rows())
    figure = bars.draw_added((small, large), "rtx3090")
    heights = [[patch.get_height() for patch in axes.patches] for axes in figure.axes]  # type: ignore[attr-defined]
    for found, drawn in zip((small, large), heights, strict=True):
        wanted = [found.checkfreq_bytes - found.training_bytes, found.executed_bytes - found.training_bytes]
        assert drawn == pytest.approx([100 * size / found.state_bytes for size in wanted])


@pytest.mark.parametrize("inside", [True, False])
def test_the_band_is_where_the_papers_marks_come_out(inside: bool) -> None:
    """AlexNet/32 stretched to the band's ends has the paper's three marks, and just beyond them it has not."""
    graph = _graph("alexnet-32")
    row = next(row for row in _rows() if peaks.name_of(row) == ("alexnet", 32))
    (load,) = feasibility.workloads([row])
    low, high = load.band_ns()
    step = 0.001 if inside else -0.001
    for target in (low * (1 + step), high * (1 - step)):
        factor = target / graph.iteration_time_ns
        stretched = graph.retimed("stretched", [round(op.time_ns * factor) for op in graph.ops])
        marks = tuple(isinstance(compile_graph(stretched, Options(rate)), Compiled) for rate in feasibility.BANDWIDTHS)
        assert (marks == load.marks) is inside


def test_chunk_verdicts_are_what_the_compiler_does() -> None:
    """A size that packs is the one the compiler uses; one that does not is cut further."""
    graph = _graph("alexnet-32")
    found = dict(zip(chunks.SIZES, chunks.verdicts(graph), strict=True))
    place = feasibility.BANDWIDTHS.index(40_000_000_000)
    for size, packs in ((2 * MIB, True), (4 * MIB, False)):
        options = Options(40_000_000_000, formulation=Formulation.COMPACT, transfers=Transfers.PACKED,
                          chunk_bytes=size, time_limit_s=2.0)  # fmt: skip
        made = compile_graph(graph, options)
        assert isinstance(made, Compiled)
        largest = max(transfer.chunk.size_bytes for transfer in made.plan.transfers)
        assert found[size][place] is packs is (largest == size)
    assert found[4 * MIB] == feasibility.TABLE_I["alexnet", 32]


def test_slack_removes_the_stalls() -> None:
    """ResNet3D at batch 1 is tight: it stalls when every timing is 10% worse, and not with slack for that."""
    graph = _graph("resnet3d-1")
    tight, slack = (drift.stalls(graph, LINK, slack_ppm) for slack_ppm in (0, drift.SLACK_PPM))
    assert tight.worse > tight.random > 0
    assert (slack.worse, slack.random) == (0, 0)


def test_a_disk_needs_the_state_once_an_iteration() -> None:
    """State over time, also where the link carries it less often."""
    (small, _) = _rows()
    graph = _graph("alexnet-1")
    state = sum(graph.tensors[index].size_bytes for index in graph.written_state)
    assert disk.needed_gb_per_s(small) == pytest.approx(state / graph.iteration_time_ns)


def test_a_table_is_text_and_markdown() -> None:
    """Words stand to the left, figures to the right, in both."""
    table = Table(("network", "ms"), (("vgg", "6.44"), ("alexnet", "12.30")))
    assert repr(table) == "network     ms\nvgg       6.44\nalexnet  12.30"
    assert table._repr_markdown_().splitlines()[:3] == ["| network | ms |", "| :-- | --: |", "| vgg | 6.44 |"]
