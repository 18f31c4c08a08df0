"""The examples of examples/: each runs where its package is installed, and says in one line where it is not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

EXAMPLES = {
    "tensorboard_events.py": "tensorboard",
    "prometheus_events.py": "prometheus_client",
    "wandb_events.py": "wandb",
    "accelerate_loop.py": "accelerate",
    "lightning_fit.py": "lightning",
}


@pytest.mark.parametrize(("name", "package"), EXAMPLES.items())
def test_an_example_runs_or_names_its_package(name: str, package: str, tmp_path: Path) -> None:
    source = ROOT / "examples" / name
    assert len(source.read_text().splitlines()) < 40
    ran = subprocess.run([sys.executable, source], cwd=tmp_path, capture_output=True, text=True)
    if importlib.util.find_spec(package) is None:
        assert ran.returncode == 1 and ran.stderr == f"{package} is not installed: pip install {package}\n"
    else:
        assert ran.returncode == 0, ran.stderr


def test_each_example_has_its_test() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
