"""tests/matrix.py: what it says of cells that did not pass, and that its sample is there."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import matrix
import pytest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(matrix, "HERE", tmp_path)
    return tmp_path


def test_a_cell_that_cannot_be_set_up_says_why(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And fails the run; its row is in the table, and no environment is left."""
    monkeypatch.setattr(sys, "argv", ["matrix.py", "3.99/2.13"])
    assert matrix.main() == 1
    assert "| 3.99 | 2.13 |  | 0 | 0 | 0 | 0 |" in capfd.readouterr().out
    assert sorted(path.name for path in here.iterdir()) == ["3_99-2_13.json", "table.md"]
    assert "no python3.99 here" in (here / "table.md").read_text()


def test_what_is_no_cell_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for cell in ("3.11", "3.11/2.13/numpy==2.0", "3.11/2.13/lightning"):
        monkeypatch.setattr(sys, "argv", ["matrix.py", cell])
        with pytest.raises(SystemExit, match="2"):
            matrix.main()
        assert f"{cell!r}: a cell is PYTHON/TORCH, like 3.11/2.9" in capfd.readouterr().err


def test_rows_are_in_the_order_of_versions() -> None:
    """2.10 comes after 2.9, and all that ever ran is there."""
    for cell in ("3.13/2.9", "3.11/2.10", "3.11/2.9", "3.11/2.9/lightning==2.10", "3.11/2.9/lightning==2.6.0"):
        python, torch, *_ = cell.split("/")
        row = matrix.Row(cell, python, torch, "2026-01-01", 1, 0, 0, 1, "")
        matrix._stem(cell).with_suffix(".json").write_text(json.dumps(asdict(row)))
    rows = ["/".join(map(str.strip, line.split("|")[1:4])) for line in matrix.table().splitlines()[2:]]
    assert rows == [
        "3.11/2.9/", "3.11/2.9/lightning==2.6.0", "3.11/2.9/lightning==2.10", "3.11/2.10/", "3.13/2.9/",
    ]  # fmt: skip


def test_each_integration_has_cells() -> None:
    """At the oldest version that its extra takes."""
    extras = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, (oldest, *_) in matrix.FRAMEWORKS.items():
        assert (matrix.ROOT / "tests" / "integrations" / f"test_{name}.py").exists()
        assert f"{name}>={oldest.removesuffix('.0')}" in extras[name]
    assert {path.stem for path in (matrix.ROOT / "checkflow/integrations").glob("[!_]*.py")} == set(matrix.FRAMEWORKS)


def test_this_python_is_found_and_the_sample_is_there() -> None:
    version = "{}.{}".format(*sys.version_info[:2])
    assert matrix.find_python(version) is not None and version in matrix.PYTHONS
    assert all((matrix.ROOT / path).exists() for path in matrix.SAMPLE)
