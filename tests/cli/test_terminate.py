"""SIGTERM ends a command like Ctrl-C does, in one line and with its own exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import children, runs

GRAPH = Path(__file__).parents[2] / "graphs" / "alexnet-1.json"


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_sigterm_while_a_solver_runs_leaves_nothing(solver: str, tmp_path: Path) -> None:
    """The solver's process and the temporary folder are gone when the command is, and no schedule is half-written."""
    arguments = [
        "compile",
        str(GRAPH),
        "--formulation",
        "paper",
        "--chunk",
        "1MiB",
        "--interval",
        "2",
        "--bandwidth",
        "63GB/s",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", "from checkflow.cli import main; main()", *arguments, "--solver", solver],
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "variables" in line:
                break
        while not (solvers := children(process.pid)):
            assert process.poll() is None
        found = list(tmp_path.glob(f"checkflow-{solver}-*/log"))
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 143 and found
    assert "interrupted" in rest and "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
    assert not any(map(runs, solvers))
