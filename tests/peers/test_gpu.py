"""benchmarks/gpu.py on tiny trainings of the host: every line of it that needs no GPU runs, and it invents nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import benchmarks_path  # noqa: F401
import gpu
import gpu_parts
import pytest
from gpu_parts import Row

COMMAND = [sys.executable, gpu.__file__, "--device", "host", "--tiny"]


def report_in(folder: Path) -> tuple[dict[str, object], dict[str, list[Row]]]:
    """The JSON's head, and its rows by part."""
    (path,) = folder.glob("*.json")
    body = json.loads(path.read_text())
    rows: dict[str, list[Row]] = {}
    for row in body.pop("rows"):
        assert row.pop("outcome") == ""  # a host meets no target of a GPU
        rows.setdefault(row["part"], []).append(Row(**row))
    return body, rows


def test_each_part_runs_on_the_host(tmp_path: Path) -> None:
    """It says that it is the host's; what a host cannot measure has a reason and no figure."""
    ran = subprocess.run([*COMMAND, "-o", tmp_path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    head, rows = report_in(tmp_path)
    assert head["device"] == "host" and "device host, tiny" in ran.stdout
    assert isinstance(head["parts"], dict) and set(head["parts"]) == set(gpu_parts.PARTS) == set(rows)
    assert all(said.startswith("done") for said in head["parts"].values())
    assert [(row.figure, row.value) for row in rows["tests"][:2]] == [("failed", 0), ("passed", 0)]
    assert rows["tests"][2].value and rows["tests"][2].figure == "skipped"
    assert [row.subject for row in rows["peaks"]] == list(gpu_parts.TINY_NETWORKS)
    assert all(row.value is None and row.note.startswith("host:") for row in rows["peaks"])
    measured = {row.figure: row.value for row in rows["iterations"]}
    assert {"bandwidth", "iteration without checkpoints", "stall per iteration", "link over plain copy"} < set(measured)
    assert all(value is not None for value in measured.values())
    assert rows["peers"] and all(row.value is not None for row in rows["peers"])
    (table,) = tmp_path.glob("*.md")
    assert all(
        f"| {row.part} | {row.subject} | {row.figure} |" in table.read_text() for of in rows.values() for row in of
    )


def test_a_run_that_is_killed_keeps_what_it_has(tmp_path: Path) -> None:
    """The part that ran ends with it, and the report says so."""
    with subprocess.Popen([*COMMAND, "--parts", "learned,peaks", "-o", tmp_path], stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob("*.json")) or not report_in(tmp_path)[1]:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    head, rows = report_in(tmp_path)
    assert process.returncode == 143 and len(rows["learned"]) == 1
    assert isinstance(head["parts"], dict) and not head["parts"]["peaks"].startswith("done")


def test_a_part_ends_with_its_time(tmp_path: Path) -> None:
    ran = subprocess.run(
        [*COMMAND, "--parts", "peaks", "--limit", "0.2", "-o", tmp_path], capture_output=True, text=True
    )
    head, rows = report_in(tmp_path)
    assert ran.returncode == 1 and head["parts"] == {"peaks": "stopped after its 0.2 s"} and not rows


def test_parts_take_nine_minutes_at_most() -> None:
    """The last has what the others leave, and that is enough for the tests."""
    *others, last = gpu_parts.PARTS
    assert gpu_parts.ALL_S == 540 and last == "tests"
    assert gpu_parts.ALL_S - sum(gpu_parts.PARTS[name].limit_s for name in others) >= 140


def test_tests_that_had_ended_count_though_there_is_no_summary() -> None:
    alone = "tests/a.py::test_one PASSED   [ 10%]\ntests/a.py::test_two[x-1] FAILED [ 20%]\ntests/a.py::test_thr"
    spread = "[gw3] [  5%] PASSED tests/a.py::test_one \n[gw11] [ 50%] SKIPPED tests/b.py::test_two \nINTERNALERROR> no"
    assert gpu_parts.outcomes(alone) == {"tests/a.py::test_one": "PASSED", "tests/a.py::test_two[x-1]": "FAILED"}
    assert gpu_parts.outcomes(spread) == {"tests/a.py::test_one": "PASSED", "tests/b.py::test_two": "SKIPPED"}
    assert gpu_parts.outcomes("ERROR tests/c.py - ImportError") == {"tests/c.py": "ERROR"}


def test_what_is_cut_off_says_what_it_had() -> None:
    said = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); print('one', flush=True); signal.pause()"
    cut = gpu_parts.until([sys.executable, "-c", said], 1.0)
    assert cut.stdout == "one\n" and cut.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        (Row("a", "b", 0.01, most=0.02), "met"),
        (Row("a", "b", 0.03, most=0.02), "MISSED"),
        (Row("a", "b", 0.96, least=0.95), "met"),
        (Row("a", "b", 0.94, least=0.95), "MISSED"),
        (Row("a", "b", 0.0, most=0), "met"),
        (Row("a", "b", None, most=0.02), ""),
        (Row("a", "b", 3.0), ""),
    ],
)
def test_a_target_is_met_or_missed_by_figures_alone(row: Row, outcome: str) -> None:
    assert row.outcome == outcome


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        (["--parts", "nothing"], "'nothing' is not known"),
        (["--device", "cuda"], "no CUDA device"),
    ):
        if "cuda" in arguments and gpu_is_here():
            continue
        ran = subprocess.run([sys.executable, gpu.__file__, *arguments, "-o", tmp_path], capture_output=True, text=True)
        assert ran.returncode == 2 and said in ran.stderr.splitlines()[-1] and not list(tmp_path.iterdir())


def gpu_is_here() -> bool:
    import torch

    return torch.cuda.is_available()
