"""An integration whose framework is not there says so in one line, and nothing else of checkflow needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = {
    "accelerate": "accelerate",
    "lightning": "lightning >= 2.6",
    "torchtitan": "torchtitan >= 0.3",
    "transformers": "transformers and accelerate",
}
OTHERS = {"lightning": ("pytorch_lightning",)}  # that would do, too


@pytest.mark.parametrize("name", NEEDS)
def test_its_absence_is_told_in_a_line(name: str, tmp_path: Path) -> None:
    for module in (name, *OTHERS.get(name, ())):
        (tmp_path / f"{module}.py").write_text("raise ImportError('no')")
    command = [sys.executable, "-c", f"import checkflow; checkflow.attach; import checkflow.integrations.{name}"]
    there = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": there})
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: checkflow.integrations.{name} needs {NEEDS[name]} (no); pip install 'checkflow[{name}]'"
    )


def test_each_integration_is_here() -> None:
    assert {path.stem for path in (ROOT / "checkflow" / "integrations").glob("[!_]*.py")} == set(NEEDS)
