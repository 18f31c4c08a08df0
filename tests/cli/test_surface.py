"""The command line's surface, frozen: an option that goes or changes its name breaks users."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from checkflow.cli import run

TRACED = {
    "model", "--batch-size", "--set", "--device", "--real", "--world-size", "--rank", "--divided",
    "-o", "--output", "--json",
}  # fmt: skip
OPTIONS = {
    "compile": TRACED
    | {
        "--bandwidth", "--memory-limit", "--relax-memory", "--chunk", "--interval", "--slack", "--formulation",
        "--transfers", "--solver", "--time-limit", "--report", "--trace-out", "--policy", "--lanes",
        "--no-factors", "--mtbf", "--disk", "--lost-machines", "--host-memory", "--approximate",
    },
    "trace": TRACED | {"--policy"},
    "verify": {"schedule", "graph", "--device", "--json"},
    "inspect": {"file", "--rows", "--export", "-o", "--output"},
    "profile": {"-o", "--output", "--name", "--device"},
    "demo": {"--iterations"},
    "list": {"store", "--json"},
    "check": {"store", "--repair", "--json"},
    "sweep": {
        "models", "--batch-size", "--set", "--bandwidth", "--device", "--policy", "--formulation", "--interval",
        "--chunk", "--slack", "--find", "--up-to", "--jobs", "-o", "--output", "--journal", "--json",
    },
    "simulate": {
        "schedules", "--mtbf", "--failures", "--devices", "--lost-machines", "--days", "--disk", "--persist-every",
        "--restart", "--replace", "--seeds", "--seed", "--iteration", "--state", "--bandwidth", "--interval", "--stall",
        "--figure", "--json",
    },
    "export": {"store", "--to", "-o", "--output", "--iteration", "--json"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_that_users_know(name: str) -> None:
    """Each command has exactly the options that this list freezes."""
    command = importlib.import_module(f"checkflow.cli.{name}").command
    assert isinstance(command, click.Command)
    assert {option for parameter in command.params for option in parameter.opts} == OPTIONS[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_help_names_every_option(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """--help works and names every option."""
    assert run([name, "--help"]) == 0
    text = capfd.readouterr().out
    assert all(option in text for option in OPTIONS[name] if option.startswith("--"))


def test_readme_names_every_command() -> None:
    """Stale documentation fails: the README speaks of each command."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert all(f"checkflow {name}" in readme for name in OPTIONS)


def test_the_page_of_commands_names_those_without_json() -> None:
    """And no other."""
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    sentence = re.search(r"`--json` prints one object: all but (.*?) have it\.", page, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == {name for name in OPTIONS if "--json" not in OPTIONS[name]}


def test_help_imports_no_command() -> None:
    """The list of commands is read from their files; it says what each command says of itself."""
    told = "import sys; from checkflow.cli import run; run(['--help']); print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True)
    text, modules = process.stdout.rsplit("\n", 2)[0], process.stdout.split("\n")[-2].split()
    assert not {"torch", "numpy", "rich", "pydantic"} & set(modules)
    assert not {f"checkflow.cli.{name}" for name in OPTIONS} & set(modules)
    listed = text.partition("Commands:")[2]
    for name in OPTIONS:
        command = importlib.import_module(f"checkflow.cli.{name}").command
        assert f"{name} " in listed
        assert command.get_short_help_str(20).removesuffix("...") in " ".join(listed.split())
