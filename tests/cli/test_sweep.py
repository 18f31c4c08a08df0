"""checkflow sweep from end to end: its answer, its files, what survives a kill, and what is refused before any work."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from modelfiles import LINEAR, beginning
from processes import descendants, runs

from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_NO
from checkflow.sweep.cells import Grid
from checkflow.sweep.check import check
from checkflow.sweep.files import Record, records
from checkflow.sweep.jobs import Answered, Ask, replies

CODE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from checkflow.cli import main; main()"
# Batches 2 and 3 are traced only once there is a file go2 or go3: until then the sweep stands where it is.
WAITING = beginning(
    "import pathlib, time\nwhile batch_size > 1 and not pathlib.Path(f'go{batch_size}').exists(): time.sleep(0.01)"
)
KILLED = beginning("import os\nif batch_size == 3: os.kill(os.getpid(), 9)\nif batch_size == 4: raise OSError('disk')")
JOURNAL = Path("s.journal.jsonl")
GRID = ["--batch-size", "1,2,3", "--bandwidth", "10GB/s,1MB/s", "--jobs", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(WAITING)


def started(done: int) -> tuple[subprocess.Popen[str], set[int]]:
    """A sweep that stands still with so many cells done, and its workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "sweep", "net.py", *GRID, "-o", "s.json"], stderr=subprocess.PIPE, text=True
    )
    while not (JOURNAL.exists() and JOURNAL.read_bytes().count(b"\n") == done):
        assert process.poll() is None
        time.sleep(0.01)
    workers = descendants(process.pid)
    while not workers:
        time.sleep(0.01)
        workers = descendants(process.pid)
    return process, workers


def test_what_was_done_is_kept_and_only_the_rest_is_computed(capfd: pytest.CaptureFixture[str]) -> None:
    """SIGKILL, and in the resumed run Ctrl-C, leave no process; the third run ends with an undisturbed run's rows."""
    process, workers = started(done=2)
    process.kill()
    process.communicate()
    while any(runs(worker) for worker in workers):
        time.sleep(0.01)
    assert not Path("s.json").exists()
    journal = JOURNAL.read_bytes()
    JOURNAL.write_bytes(journal + b'{"checkflow":"torn')

    Path("go2").touch()
    process, workers = started(done=5)  # the torn line ends where the next begins
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130
    assert "4 of 6 done" in said.splitlines()[-1] and "Traceback" not in said
    assert not any(runs(worker) for worker in workers)
    assert JOURNAL.read_bytes().startswith(journal)

    Path("go3").touch()
    assert run(["sweep", "net.py", *GRID, "-o", "s.json"]) == EXIT_DONE
    assert "4 taken from the journal, 2 computed" in " ".join(capfd.readouterr().out.split())
    found = json.loads(Path("s.json").read_text())["rows"]
    assert [row["batch_size"] for row in found] == [1, 1, 2, 2, 3, 3]
    assert untimed_records(found) == untimed_records(undisturbed())


def test_sigterm_has_its_own_exit_code() -> None:
    """As with Ctrl-C it says what is kept, and no worker is left."""
    process, workers = started(done=2)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert process.returncode == 143
    assert "2 of 6 done" in said.splitlines()[-1] and "Traceback" not in said
    assert not any(runs(worker) for worker in workers)


def undisturbed() -> list[Record]:
    """The same grid's rows, with no process, no journal and no interruption."""
    cells = Grid(
        models=("net.py",), settings=(("batch_size", ("1", "2", "3")),), bandwidths_bytes_per_s=(10**10, 10**6)
    ).cells()
    profiles = check(cells)
    given = replies(Ask(cells, tuple(profiles[cell] for cell in cells), None))
    return records([reply.answer for reply in given if isinstance(reply, Answered)])


def untimed_records(found: list[Record]) -> list[Record]:
    return [{name: value for name, value in row.items() if name != "plan_s"} for row in found]


def test_a_cell_that_fails_stops_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker that is killed and a factory that raises are rows with one line; JSON, CSV and --json are equal."""
    Path("net.py").write_text(KILLED)
    arguments = ["sweep", "net.py", "--batch-size", "3,4,5", "--bandwidth", "10GB/s,1MB/s", "--jobs", "1", "--json"]
    assert run([*arguments, "-o", "s.json", "-o", "s.csv"]) == EXIT_NO
    printed = json.loads(capfd.readouterr().out)
    assert printed == json.loads(Path("s.json").read_text())
    found = printed["rows"]
    assert [row["outcome"] for row in found] == ["failed"] * 4 + ["feasible", "infeasible"]
    assert "SIGKILL" in str(found[0]["message"]) and "OSError: disk" in str(found[2]["message"])
    with Path("s.csv").open(newline="") as stream:
        read = list(csv.DictReader(stream))
    assert read == [{key: "" if value is None else str(value) for key, value in row.items()} for row in printed["rows"]]
    assert len(JOURNAL.read_text().splitlines()) == 2


def test_the_table_says_what_a_person_looks_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A column for each bandwidth, the reason and what would do below, a summary; a narrow terminal loses nothing.

    And nothing is left in the temporary folder.
    """
    Path("net.py").write_text(LINEAR)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    arguments = ["sweep", "net.py", "--batch-size", "1,2", "--bandwidth", "10GB/s,1MB/s", "--interval", "1,auto"]
    arguments += ["--journal", "j.jsonl"]
    for width in ("200", "60"):
        monkeypatch.setattr("checkflow.cli._console.out._width", int(width))
        assert run(arguments) == EXIT_DONE
        printed = capfd.readouterr().out
        assert all(len(line) <= int(width) for line in printed.splitlines() if "policy" not in line)
        text = " ".join(printed.split())
        for word in (
            "10.0 GB/s",
            "1.00 MB/s",
            "yes",
            "bandwidth",
            "k=1",
            "what would do",
            "training",
            "saving",
            "disk",
        ):
            assert word in text
        assert "feasible: 6 of 8" in text and "median saving" in text
    assert list(temporary.iterdir()) == []


def test_find_shows_the_edge_and_what_fails_below_it(capfd: pytest.CaptureFixture[str]) -> None:
    """The bandwidth with its neighbour; the same command again takes it from the journal, as records too."""
    Path("net.py").write_text(LINEAR)
    arguments = ["sweep", "net.py", "--journal", "j.jsonl", "--jobs", "1", "--find", "bandwidth"]
    assert run(arguments) == EXIT_DONE
    assert "1 B/s less: bandwidth" in capfd.readouterr().out
    assert run(arguments) == EXIT_DONE
    assert "1 taken from the journal, 0 computed" in " ".join(capfd.readouterr().out.split())
    assert run([*arguments, "--json"]) == EXIT_DONE
    (row,) = json.loads(capfd.readouterr().out)["rows"]
    assert row["found"] == row["bandwidth_bytes_per_s"] == row["fails"] + 1 and row["outcome"] == "feasible"


WRONG = {
    "model": (["missing.py"], "missing.py"),
    "device": (["good.py", "--device", "rtx3090,rtx9999"], "rtx9999"),
    "measure": (["good.py", "--device", "measure"], "checkflow profile"),
    "policy": (["good.py", "--policy", "checkflow,hope"], "hope"),
    "formulation": (["good.py", "--formulation", "magic"], "magic"),
    "bandwidth": (["good.py", "--bandwidth", "63GB/s,fast"], "--bandwidth"),
    "no value": (["good.py", "--bandwidth", "63GB/s,,20GB/s"], "--bandwidth"),
    "interval": (["good.py", "--interval", "0"], "--interval"),
    "interval unplanned": (["good.py", "--interval", "65537"], "--interval 65537"),
    "interval of many digits": (["good.py", "--interval", "1," + "9" * 5000], "--interval"),
    "bandwidth of many digits": (["good.py", "--bandwidth", "9" * 5000], "--bandwidth"),
    "slack": (["good.py", "--slack", "0,1"], "--slack"),
    "slack word": (["good.py", "--slack", "much"], "--slack"),
    "chunk": (["good.py", "--chunk", "0"], "--chunk"),
    "argument": (["good.py", "alexnet", "--set", "width=8"], "width"),
    "batch": (["good.py", "--batch-size", "1,none"], "batch_size"),
    "twice": (["good.py", "--batch-size", "1", "--set", "batch_size=2"], "twice"),
    "output": (["good.py", "-o", "s.txt"], "s.txt"),
    "unwritable": (["good.py", "-o", "/proc/nowhere/s.json"], "/proc/nowhere/s.json"),
    "journal": (["good.py", "--journal", "missing/j"], "missing/j"),
    "journal is a device": (["good.py", "--journal", "/dev/full"], "/dev/full: is a device; give a file"),
    "journal is a folder": (["good.py", "--journal", "."], "--journal"),
    "searched": (["good.py", "--find", "bandwidth", "--bandwidth", "1GB/s"], "--find bandwidth"),
    "searched batch": (["good.py", "--find", "batch_size", "--batch-size", "2"], "--find batch_size"),
    "no batch": (["nobatch.py", "--find", "batch_size"], "batch_size"),
    "auto": (["good.py", "--find", "bandwidth", "--interval", "auto"], "--interval auto"),
    "find": (["good.py", "--find", "happiness"], "--find"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_before_any_work(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names it, exit code 2, and no process was started."""
    Path("good.py").write_text(LINEAR)
    Path("nobatch.py").write_text(LINEAR.replace("batch_size: int = 2, ", "").replace("batch_size", "2"))
    monkeypatch.setattr("checkflow.sweep.pool._Worker", _no_process)
    arguments, expected = WRONG[name]
    assert run(["sweep", *arguments]) == EXIT_BAD_INPUT
    captured = capfd.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1, captured.err
    assert expected in captured.err and "internal error" not in captured.err


def _no_process(_: str) -> Iterator[None]:
    raise AssertionError("a process was started")
