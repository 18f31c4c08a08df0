"""What a sweep of graphs does without: torch takes longer to import than a plan to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GRAPH = Path(__file__).parents[2] / "graphs" / "alexnet-1.json"
SWEPT = """
import sys
from pathlib import Path

import checkflow.sweep.worker
from checkflow import sweep
from checkflow.hardware import load_profile
from checkflow.sweep.jobs import Ask, Trace, replies

grid = sweep.Grid(models=(sys.argv[1],), devices=("rtx3090",), intervals=(None,))
rows = sweep.run(grid, jobs=1, journal=Path(sys.argv[2]))
(traced,) = replies(Trace(sys.argv[1], ()))
(answered,) = replies(Ask(grid.cells(), (load_profile("rtx3090"),), traced))
assert rows[0].feasible and answered.answer.peak_bytes == rows[0].peak_bytes
assert "torch" not in sys.modules
"""


def test_a_sweep_of_graphs_imports_no_torch(tmp_path: Path) -> None:
    """Neither the sweep nor what its workers do."""
    command = [sys.executable, "-c", SWEPT, str(GRAPH), str(tmp_path / "journal")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
