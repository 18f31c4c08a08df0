"""The feasibility edge: right for every threshold, and as brute force finds it on real networks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modelfiles import LINEAR

from checkflow.hardware import load_profile
from checkflow.plan import Formulation
from checkflow.sweep.cells import Axis, Cell, Edge, Outcome, Row, Search, cell_of
from checkflow.sweep.feasibility_edge import LEAST_BYTES_PER_S, MOST_BYTES_PER_S, cell_at, edge_of, value_of
from checkflow.sweep.jobs import Answered, Ask, replies
from checkflow.sweep.traces import trace

LINK = 25 * 10**9


def searched(axis: Axis, least: int, hint: int | None = None, up_to: int = 4096) -> tuple[Edge, set[int]]:
    """The edge where exactly the values from `least` on are feasible, and which values were tried."""
    search = Search(cell=Cell(model="net"), axis=axis, up_to=up_to)
    tried = set()

    def evaluate(cell: Cell) -> Row:
        row = Row(cell=cell, outcome=Outcome.INFEASIBLE, needed_bandwidth_bytes_per_s=hint, smallest_interval=hint)
        value = value_of(row, axis)
        tried.add(value)
        return row.model_copy(update={"outcome": Outcome.FEASIBLE}) if value >= least else row

    return edge_of(search, LINK, evaluate), tried


@pytest.mark.parametrize("axis", [Axis.INTERVAL, Axis.BATCH_SIZE])
@given(least=st.integers(2, 4096), hint=st.none() | st.integers(1, 5000))
def test_whole_numbers_are_found_exactly(axis: Axis, least: int, hint: int | None) -> None:
    """The least feasible value and the one below it, whatever an infeasible row says would do."""
    edge, tried = searched(axis, least, hint)
    assert edge.found is not None and edge.fails is not None
    assert (value_of(edge.found, axis), value_of(edge.fails, axis)) == (least, least - 1)
    assert edge.tried == len(tried)


@given(least=st.integers(LEAST_BYTES_PER_S + 1, MOST_BYTES_PER_S), off=st.none() | st.integers(-2, 2) | st.just(10**9))
def test_a_bandwidth_is_found_to_its_resolution(least: int, off: int | None) -> None:
    """By bisection to 0.1 GB/s, and to 0.1% where that is finer; exactly where an infeasible row knows it."""
    edge, _ = searched(Axis.BANDWIDTH, least, None if off is None else least + off)
    assert edge.found is not None and edge.fails is not None
    above, below = value_of(edge.found, Axis.BANDWIDTH), value_of(edge.fails, Axis.BANDWIDTH)
    assert below < least <= above
    assert above - below <= max(1, min(10**8, above // 1000))
    if off == 0:
        assert above - below == 1


@pytest.mark.parametrize("axis", Axis)
def test_ends_of_an_axis(axis: Axis) -> None:
    """Where everything tried is feasible there is no value that fails, where nothing is there is none found."""
    everything, _ = searched(axis, 0)
    assert everything.found is not None and everything.fails is None and "least there is" in everything.message
    nothing, tried = searched(axis, 10**18, up_to=1000)
    assert nothing.found is None and nothing.fails is not None and "up to" in nothing.message
    assert axis is not Axis.BATCH_SIZE or max(tried) == 1000


CELLS = {
    "alexnet": Cell(model="alexnet", settings=(("small", "true"),)),
    "transformer": Cell(model="transformer", settings=(("small", "true"),)),
    "compact": Cell(model="transformer", settings=(("small", "true"),), formulation=Formulation.COMPACT),
}


def answered(*questions: Cell | Search) -> list[Row | Edge]:
    """As a worker answers, with one trace for all but searches over the batch."""
    cell = cell_of(questions[0])
    by_itself = isinstance(questions[0], Search) and questions[0].axis is Axis.BATCH_SIZE
    traced = None if by_itself else cached_trace(cell.model, cell.settings)
    job = Ask(questions, tuple(load_profile("rtx3090") for _ in questions), traced)
    found = [reply.answer for reply in replies(job) if isinstance(reply, Answered)]
    assert len(found) == len(questions)
    return found


cached_trace = cache(trace)


@cache
def feasible(cell: Cell) -> bool:
    (row,) = answered(cell)
    assert isinstance(row, Row) and not row.failed
    return row.feasible


@pytest.mark.parametrize("name", CELLS)
def test_the_interval_found_is_that_of_brute_force(name: str) -> None:
    """Every interval below the edge is infeasible, and the edge is not."""
    slow = {"alexnet": 100_000_000, "transformer": 20_000_000, "compact": 150_000_000}[name]
    cell = CELLS[name].model_copy(update={"bandwidth_bytes_per_s": slow})
    search = Search(cell=cell, axis=Axis.INTERVAL)
    (edge,) = answered(search)
    assert isinstance(edge, Edge) and edge.found is not None and edge.found.interval is not None
    assert edge.found.interval > 1
    tried = {value: feasible(cell_at(search, value)) for value in range(1, edge.found.interval + 3)}
    assert min(value for value, good in tried.items() if good) == edge.found.interval


@pytest.mark.parametrize("name", CELLS)
def test_the_bandwidth_found_is_that_of_a_grid(name: str) -> None:
    """On a grid of bandwidths around the edge exactly those above it are feasible."""
    search = Search(cell=CELLS[name], axis=Axis.BANDWIDTH)
    (edge,) = answered(search)
    assert isinstance(edge, Edge) and edge.found is not None and edge.fails is not None
    above, below = value_of(edge.found, Axis.BANDWIDTH), value_of(edge.fails, Axis.BANDWIDTH)
    assert edge.search.cell.formulation is not Formulation.DIRECT or above - below == 1
    for percent in (25, 50, 90, 99, 100, 101, 110, 150, 300):
        assert feasible(cell_at(search, above * percent // 100)) == (percent >= 100)
    assert not feasible(cell_at(search, below))


def test_the_batch_found_is_that_of_brute_force(tmp_path: Path) -> None:
    """Every batch below the edge is infeasible, and the edge is not; the figures are those at the edge."""
    path = tmp_path / "net.py"
    path.write_text(LINEAR.replace("model(torch.ones(", "for _ in range(batch_size): model(torch.ones("))
    cell = Cell(model=str(path), settings=(("width", "65"),), bandwidth_bytes_per_s=120 * 10**6)
    search = Search(cell=cell, axis=Axis.BATCH_SIZE)
    (edge,) = answered(search)
    assert isinstance(edge, Edge) and edge.found is not None
    batch = value_of(edge.found, Axis.BATCH_SIZE)
    assert 2 < batch < 20
    tried = {value: feasible(cell_at(search, value)) for value in range(1, batch + 2)}
    assert min(value for value, good in tried.items() if good) == batch
    (row,) = answered(cell_at(search, batch))
    assert isinstance(row, Row)
    assert row.peak_bytes == edge.found.peak_bytes


def test_a_batch_above_the_devices_memory_is_flagged(tmp_path: Path) -> None:
    """Fake tensors take any batch; a peak that the device does not have is said."""
    path = tmp_path / "net.py"
    path.write_text(LINEAR)
    cells = [
        Cell(model=str(path), settings=(("batch_size", batch), ("width", "4096")), bandwidth_bytes_per_s=10**9)
        for batch in ("2", str(10**6))
    ]
    (small,), (large,) = (answered(cell) for cell in cells)
    assert isinstance(small, Row) and isinstance(large, Row)
    assert (small.exceeds_memory, large.exceeds_memory) == (False, True) and large.feasible
