"""What peers.py computes from its measurements, and the files it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import benchmarks_path  # noqa: F401 (makes the next ones importable)
import peers
import pytest
from contenders import Job, Tier
from forked_workers import forked  # noqa: F401 (a fixture for each test here)
from matplotlib import pyplot as plt
from peering import faults, kills
from peering.figure import draw, page
from peering.markdown import markdown
from peering.orders import Attach, Done
from peering.pairs import spread
from peering.processes import ToolError, worker
from peering.reportfile import joined, read_report, write_report
from peering.results import Kills, Overhead, Report, Tool
from peering.tables import show, tools
from rich.console import Console

MEASURED = Overhead(
    "tiny", "torch_save", "disk", 10, 10, 3, 5.0, 0.5, 0.5, 0.4, 0.6, 1.0, 1.5, 2.0, 20.0, 10**6, 0, 1e6, (2.0, 1.0)
)


def test_what_a_tool_prepares_once_is_shown() -> None:
    tool = Tool("checkflow", "how", "0", durable=True, verifies=True, prepared_s={"tiny": 9.6, "conv": 10.1})
    console = Console(record=True, width=200)
    console.print(tools((tool,)))
    assert "how; prepared tiny in 10 s; prepared conv in 10 s" in console.export_text()


def test_a_save_costs_the_same_time_at_a_longer_interval() -> None:
    """Half the throughput lost at every tenth: ten iterations' time for a save, a tenth of a hundred's."""
    sparse = spread(MEASURED, 100)
    assert sparse.spread
    assert sparse.loss == pytest.approx(1 - 1 / 1.1)
    assert sparse.blocked_ms == pytest.approx(0.2)
    assert sparse.blocked_save_ms == 20.0


def test_a_report_says_what_was_measured_and_not_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be shown to others."""
    given = "--thorough --workloads conv --parts overhead --directory /somewhere -o somewhere.json"
    monkeypatch.setattr("sys.argv", ["/somewhere/peers.py", *given.split()])
    assert peers.chosen().command == "peers.py --workloads conv --parts overhead --kills 20 --thorough"


def test_a_report_is_written_read_shown_and_drawn(tmp_path: Path) -> None:
    """JSON gives back what went in; table and figure take it."""
    tool = Tool("torch_save", "how", "torch 0", durable=True, verifies=False, prepared_s={"tiny": 9.6})
    report = Report(
        "machine", "2026-01-01", "peers.py", 1.0, 0.5, {}, (tool, replace(tool, name="other", missing="not here")),
        {"tiny": "a model"}, {"gpt2-cuda": "needs CUDA"}, [MEASURED, replace(MEASURED, interval=1)],
    )  # fmt: skip
    write_report(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json") == report
    console = Console(record=True, width=200)
    show(report, console)
    shown = console.export_text()
    assert "50.0%" in shown and "not here" in shown and "needs CUDA" in shown
    assert "| torch_save | 50.0% (40% to 60%) |" in markdown(report)
    draw(report, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_runs_of_different_parts_are_shown_as_one() -> None:
    """Of a row that both measured, the newer run counts."""
    tool = Tool("torch_save", "how", "torch 0", durable=True, verifies=False)
    kept = Kills("torch_save", "disk", (1, 0), (5, 6), 0)
    each = replace(MEASURED, interval=1)
    older = Report("machine", "2026-01-01", "a", 1.0, 0.5, {}, (tool,), {}, {}, [each, MEASURED], kills=[kept])
    newer = Report("machine", "2026-01-02", "b", 2.0, 0.1, {}, (replace(tool, version="torch 1"),), {}, {})
    newer.overheads.append(replace(MEASURED, loss=0.1))
    newer.kills.append(replace(kept, workload="conv"))
    both = joined([older, newer])
    assert (both.overheads, both.kills) == ([each, *newer.overheads], [kept, *newer.kills])
    assert markdown(both).index("| torch_save | conv | disk | 0.50 |") < markdown(both).index("| torch_save | tiny |")
    assert (both.date, both.command, both.seconds, both.tools) == ("2026-01-02", "a; b", 3.0, newer.tools)


def test_flipped_bits_and_kills_are_told_apart(tmp_path: Path) -> None:
    """torch.save: a killed trainer loses at most what it was saving; most flipped bits are loaded."""
    job = Job(tmp_path / "store", 1, Tier.MEMORY, "tiny", tmp_path)
    job.folder.mkdir()
    lost = kills.measure("torch_save", job, tmp_path / "log", 2)
    assert len(lost.lost) == 2 and max(lost.lost) <= 1 and lost.refused == 0
    flipped = tmp_path / "flipped"
    flipped.mkdir()
    assert "loaded silently" in faults.flipped_bit("torch_save", replace(job, folder=flipped), tmp_path / "log").outcome


def test_a_worker_that_raises_says_what(tmp_path: Path) -> None:
    """A tool's error is a result, in one line, and the worker goes on."""
    job = Job(tmp_path / "absent", 1, Tier.DISK, "tiny", tmp_path)
    with worker("tiny", "checkflow", tmp_path / "log") as process:
        with pytest.raises(ToolError, match=r"schedule\.json"):
            process.ask(Attach(job), Done)
        assert not process.ended


def test_names_that_are_not_known_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that lists what there is."""
    monkeypatch.setattr("sys.argv", ["peers.py", "--contenders", "torch_sav"])
    with pytest.raises(SystemExit):
        peers.chosen()
    assert "'torch_sav' is not known" in capsys.readouterr().err


def test_no_label_of_the_figure_overlaps_another() -> None:
    """Of the stored reports: numbers beside bars, names of tools, legends; and each number is within its plot."""
    reports = sorted((Path(peers.__file__).parent / "reports").glob("2026-11-22-*.json"))
    figure = page(joined([read_report(path) for path in reports]))
    figure.canvas.draw()
    shown = 0
    for axis in figure.axes:
        frame = axis.get_window_extent()
        numbers = [text.get_window_extent() for text in axis.texts]
        names = [label.get_window_extent() for label in axis.get_yticklabels() if label.get_text()]
        for boxes in (numbers, names):
            for index, box in enumerate(boxes):
                assert not any(box.overlaps(other) for other in boxes[:index]), axis.get_title()
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in numbers), axis.get_title()
        legend = axis.get_legend()
        assert legend is None or not legend.get_window_extent().overlaps(frame), axis.get_title()
        shown += len(numbers)
    plt.close(figure)
    assert shown >= 70
