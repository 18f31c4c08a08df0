"""A cell's row: its figures agree with a compilation's and with the policies', and its trouble stays its own."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from modelfiles import beginning

from checkflow import hardware, policies
from checkflow.compiler import Compiled, Options, Refused, compile_graph, explain
from checkflow.errors import InputError
from checkflow.graphfile import write_graph
from checkflow.plan import Formulation, Transfers, problem_of
from checkflow.policies import checkfreq
from checkflow.policies.rule import Asked
from checkflow.schedule import Schedule
from checkflow.sweep import records
from checkflow.sweep.cells import Cell, Grid, Outcome, Row
from checkflow.sweep.check import check
from checkflow.sweep.files import write
from checkflow.sweep.jobs import Answered, Ask, Broken, Trace, replies
from checkflow.sweep.traces import TracedModel, trace

BANDWIDTH = 1_200_000_000
SETTINGS = (("batch_size", "32"), ("optimizer", "adamw"), ("small", "true"))
SMALL = Cell(model="alexnet", settings=SETTINGS, bandwidth_bytes_per_s=BANDWIDTH)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def small() -> TracedModel:
    return trace(SMALL.model, SMALL.settings)


def rows_of(traced: TracedModel | None, *cells: Cell) -> list[Row]:
    profiles = check(cells)
    job = Ask(cells, tuple(profiles[cell] for cell in cells), traced)
    return [reply.answer for reply in replies(job) if isinstance(reply, Answered) and isinstance(reply.answer, Row)]


def test_a_row_is_what_compile_says(small: TracedModel) -> None:
    """Peaks, state and interval are those of the verified schedule; overhead, saving and disk follow from them."""
    (row,) = rows_of(small, SMALL.model_copy(update={"formulation": Formulation.COMPACT, "interval": None}))
    profile = hardware.load_profile("rtx3090")
    options = Options(BANDWIDTH, interval=None, formulation=Formulation.COMPACT)  # which always has snapshots
    compiled = compile_graph(hardware.retime(small.graph, profile), options)
    assert isinstance(compiled, Compiled)
    certificate = compiled.schedule.certificate
    assert row.feasible and row.interval == compiled.problem.interval and row.device == "rtx3090"
    assert row.packed_peak_bytes == compiled.plan.peak_bytes and row.peak_bytes == certificate.peak_bytes
    assert row.training_peak_bytes == certificate.training_peak_bytes
    assert row.state_bytes == compiled.problem.state_bytes == compiled.schedule.state_bytes
    period_ns = compiled.graph.iteration_time_ns * compiled.problem.interval
    executed = certificate.snapshot_bytes
    assert executed > 0 and row.copy_ns == pytest.approx(2e9 * executed / (936e9 * 0.8), abs=1)
    assert row.copy_ns and row.overhead == row.copy_ns / period_ns
    assert row.disk_bytes_per_s == pytest.approx(row.state_bytes * 1e9 / period_ns, abs=1)
    checkfreq_bytes = checkfreq.at_best(compiled.problem).peak_bytes
    assert row.checkfreq_peak_bytes == checkfreq_bytes
    assert row.saving == 1 - certificate.peak_bytes / checkfreq_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 2},
        {"formulation": Formulation.COMPACT, "interval": None},
        {"chunk_bytes": 1024},
        {"slack_ppm": 20_000},
        {"slack_ppm": 200_000},
    ],
)
def test_every_axis_reaches_the_planner(options: dict[str, object], small: TracedModel) -> None:
    """An interval, formulation, chunk or slack gives what compile gives with the same option."""
    (row,) = rows_of(small, SMALL.model_copy(update=options))
    packed = {"transfers": Transfers.PACKED} if "formulation" in options else {}
    graph = hardware.retime(small.graph, hardware.load_profile("rtx3090"))
    result = compile_graph(graph, replace(Options(BANDWIDTH), **options, **packed))  # type: ignore[arg-type]
    if isinstance(result, Refused):
        assert (row.outcome, row.message) == (Outcome.INFEASIBLE, explain(result))
        return
    certificate = result.schedule.certificate
    assert (row.packed_peak_bytes, row.peak_bytes, row.interval, row.snapshot_bytes) == (
        result.plan.peak_bytes if packed else None,
        certificate.peak_bytes,
        result.problem.interval,
        certificate.snapshot_bytes,
    )


@pytest.mark.parametrize("name", ["checkfreq", "checkfreq_cpu", "synchronous"])
def test_a_row_is_what_a_policy_says(name: str, small: TracedModel) -> None:
    """Peak and pause are those of its schedule; a link so slow that training pauses costs what the pause takes."""
    cell = SMALL.model_copy(update={"policy": name, "formulation": None, "bandwidth_bytes_per_s": 10**7})
    (row,) = rows_of(small, cell)
    graph = hardware.retime(small.graph, hardware.load_profile("rtx3090"))
    schedule = policies.load(name).schedule(problem_of(graph, bandwidth_bytes_per_s=10**7), graph, Asked(10**7))
    assert isinstance(schedule, Schedule)
    certificate = schedule.certificate
    assert certificate.pause_ns > 0 and row.pause_ns == certificate.pause_ns
    assert row.peak_bytes == certificate.peak_bytes and row.packed_peak_bytes is None
    assert row.snapshot_bytes == certificate.snapshot_bytes and row.copy_ns is not None
    assert row.overhead == (certificate.pause_ns + row.copy_ns) / graph.iteration_time_ns


def test_a_row_of_parts_is_what_gockpt_says(small: TracedModel) -> None:
    """Its peak, and as copies what is copied: a gradient that is held is not."""
    cell = SMALL.model_copy(update={"policy": "gockpt", "formulation": None, "interval": 2})
    (row,) = rows_of(small, cell)
    graph = hardware.retime(small.graph, hardware.load_profile("rtx3090"))
    problem = problem_of(graph, bandwidth_bytes_per_s=BANDWIDTH, interval=2)
    schedule = policies.load("gockpt").schedule(problem, graph, Asked(BANDWIDTH))
    assert isinstance(schedule, Schedule) and row.peak_bytes == schedule.certificate.peak_bytes
    assert row.snapshot_bytes == schedule.certificate.snapshot_bytes - schedule.held_bytes() and not row.pause_ns


def test_policy_checkflow_is_the_direct_formulation(small: TracedModel) -> None:
    """What the policy plans is what the row says was planned."""
    (row,) = rows_of(small, SMALL)
    graph = hardware.retime(small.graph, hardware.load_profile("rtx3090"))
    problem = problem_of(graph, bandwidth_bytes_per_s=BANDWIDTH)
    schedule = policies.load("checkflow").schedule(problem, graph, Asked(BANDWIDTH))
    assert isinstance(schedule, Schedule) and row.peak_bytes == schedule.certificate.peak_bytes


def test_an_infeasible_row_says_what_would_do_and_it_does(small: TracedModel) -> None:
    """The bandwidth and the interval of an infeasible row are feasible when they are tried; auto goes there."""
    slow = SMALL.model_copy(update={"bandwidth_bytes_per_s": 5 * 10**8})
    (row,) = rows_of(small, slow)
    assert row.outcome is Outcome.INFEASIBLE and row.reason == "bandwidth" and "what would do" in row.message
    faster = slow.model_copy(update={"bandwidth_bytes_per_s": row.needed_bandwidth_bytes_per_s})
    longer, auto = (slow.model_copy(update={"interval": value}) for value in (row.smallest_interval, None))
    found = rows_of(small, faster, longer, auto)
    assert all(each.feasible for each in found)
    assert found[2].interval == found[1].interval == row.smallest_interval


def test_a_graph_is_a_model_with_times_of_its_own(small: TracedModel) -> None:
    """A graph's own times are kept unless a device is asked for; an unknown link has to be given."""
    write_graph(Path("g.json"), small.graph.retimed("measured", [1000] * small.graph.steps))
    own = Cell(model="g.json", bandwidth_bytes_per_s=10**12)
    (traced,) = replies(Trace("g.json", ()))
    assert isinstance(traced, TracedModel)
    row, timed = rows_of(traced, own, own.model_copy(update={"device": "h100"}))
    assert row.device == "measured" and row.iteration_time_ns == 1000 * small.graph.steps and row.overhead is None
    assert timed.device == "h100" and timed.overhead is not None
    with pytest.raises(InputError, match="--bandwidth"):
        check([Cell(model="g.json")])


def test_models_in_two_folders_may_import_modules_of_one_name() -> None:
    """Each model gets the helper beside it, and each trace names the files it used."""
    for name, width in (("a", 8), ("b", 16)):
        Path(name).mkdir()
        Path(name, "helper.py").write_text(f"WIDTH = {width}\n")
        Path(name, "net.py").write_text(beginning("from helper import WIDTH\nwidth = WIDTH"))
    traces = {name: trace(f"{name}/net.py", ()) for name in ("a", "b")}
    for name, width in (("a", 8), ("b", 16)):
        largest = max(tensor.size_bytes for tensor in traces[name].graph.tensors if tensor.role.is_state)
        assert largest == width * width * 4
        assert {Path(path).relative_to(Path.cwd()) for path, _ in traces[name].files} == {
            Path(name, "net.py"),
            Path(name, "helper.py"),
        }


def test_a_model_that_cannot_be_traced_is_one_line() -> None:
    """Whatever a model raises is told in one line, and a cell's own trouble does not reach the next cell."""
    Path("net.py").write_text(beginning("if batch_size > 2: raise MemoryError('no\\nroom')"))
    good, bad = (Cell(model="net.py", settings=(("batch_size", batch),)) for batch in ("2", "3"))
    (broken,) = replies(Trace(bad.model, bad.settings))
    assert isinstance(broken, Broken) and "MemoryError" in broken.message and "\n" not in broken.message
    first, second = rows_of(None, bad, good)
    assert first.failed and second.outcome is not Outcome.FAILED


def test_a_grid_has_each_cell_once() -> None:
    """The formulation matters to policy checkflow alone; what is asked twice is asked once."""
    grid = Grid(
        models=("alexnet", "bert"),
        settings=(("batch_size", ("1", "2")),),
        policies=("checkflow", "checkfreq"),
        formulations=(Formulation.DIRECT, Formulation.PAPER),
        bandwidths_bytes_per_s=(1, 2, 1),
    )
    cells = grid.cells()
    assert len(cells) == len(set(cells)) == 2 * 2 * 3 * 2
    assert [cell.model for cell in cells] == sorted(cell.model for cell in cells)


def test_csv_and_json_hold_the_same(small: TracedModel) -> None:
    """Each value of the JSON rows is in the CSV, under the same name, for rows of every outcome."""
    slow = SMALL.model_copy(update={"bandwidth_bytes_per_s": 5 * 10**8})
    rows = rows_of(small, SMALL, slow)
    rows.append(Row(cell=SMALL, outcome=Outcome.FAILED, message='a "quoted", long\tline'))
    write(Path("s.json"), rows)
    write(Path("s.csv"), rows)
    written = json.loads(Path("s.json").read_text())["rows"]
    with Path("s.csv").open(newline="") as stream:
        read = list(csv.DictReader(stream))
    assert written == json.loads(json.dumps(records(rows)))
    assert [{key: "" if value is None else str(value) for key, value in row.items()} for row in written] == read
    assert (written[0]["batch_size"], written[0]["small"], written[0]["outcome"]) == (32, "true", "feasible")


def test_an_argument_named_like_a_column_keeps_both() -> None:
    """A factory argument whose name is taken is told apart, and what only looks like a number stays text."""
    settings = (("interval", "3"), ("name", "nan"), ("rate", "1e-3"))
    (record,) = records([Row(cell=Cell(model="m", settings=settings), outcome=Outcome.FAILED)])
    assert (record["interval"], record["set.interval"], record["name"], record["rate"]) == (1, 3, "nan", 0.001)
