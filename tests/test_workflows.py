"""The public CI does what make does: its files parse, and name only targets and folders that there are."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from matrix import PYTHONS, TORCHES

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def test_there_is_one_for_changes_and_one_for_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "release"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_command_is_a_make_target(path: Path) -> None:
    """And each action is of a version."""
    commands = [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        made = re.fullmatch(r'make ([a-z]+)( [A-Z]+="[^"]*")?', command)
        assert made is not None and made[1] in TARGETS, command
    used = [step["uses"] for job in jobs(path).values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", action) for action in used)
    assert all("timeout-minutes" in job for job in jobs(path).values())


def test_every_supported_python_and_torch_is_tried() -> None:
    """The suite runs on each Python, the sample in each cell, and what is published says the same."""
    ci = jobs(ROOT / ".github" / "workflows" / "ci.yml")
    assert ci["suite"]["strategy"]["matrix"]["python"] == list(PYTHONS)
    assert ci["matrix"]["strategy"]["matrix"] == {"python": list(PYTHONS), "torch": list(TORCHES)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={PYTHONS[0]}" and f"torch>={TORCHES[0]}" in project["dependencies"]


def test_only_publishing_may_ask_who_it_is() -> None:
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    asking = [name for name, job in release.items() if "id-token" in job.get("permissions", {})]
    assert asking == ["publish"] and release["publish"]["needs"] == "build"


def test_a_tag_has_to_name_the_version() -> None:
    """make dist stops before it builds anything."""
    for tag, right in (("v9.9.9", False), ("v0.1.0", True)):
        line = subprocess.run(
            ["make", "--no-print-directory", "-n", "dist", f"TAG={tag}"], cwd=ROOT, capture_output=True, text=True
        ).stdout
        check = next(line for line in line.splitlines() if line.startswith("test -z"))
        assert (subprocess.run(check, shell=True, cwd=ROOT).returncode == 0) is right
