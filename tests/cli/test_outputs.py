"""What a command writes lies where it was asked for, and nothing that it reads, or wrote, is lost to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkflow import hardware
from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE

GRAPH = Path(__file__).parents[2] / "graphs" / "alexnet-1.json"
READ, TWICE = "is read, and would be overwritten", "two outputs would be written there"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph, a model file and a profile."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(GRAPH, "g.graph.json")
    for name in ("net.py", "mine.yaml", "old.json", "notes.txt", "s.schedule.json"):
        Path(name).write_text(f"what {name} says\n")


LOST = {
    "the graph that a graph is made of": (["trace", "g.graph.json", "--device", "h100"], "g.graph.json", READ),
    "a model file": (["compile", "net.py", "-o", "net.py"], "net.py", READ),
    "a factory's file": (["compile", "net.py:small", "-o", "./net.py"], "net.py", READ),
    "a profile": (["trace", "net.py", "--device", "mine.yaml", "-o", "mine.yaml"], "mine.yaml", READ),
    "a schedule": (["compile", "net.py", "-o", "y.json", "--trace-out", "y.json"], "y.json", TWICE),
    "a report": (["compile", "net.py", "-o", "y.html", "--report", "y.html"], "y.html", TWICE),
    "a graph": (["inspect", "g.graph.json", "--export", "graphml", "-o", "g.graph.json"], "g.graph.json", READ),
    "a sweep's graph": (["sweep", "g.graph.json", "-o", "g.graph.json"], "g.graph.json", READ),
    "a sweep's model": (["sweep", "g.graph.json", "net.py", "--journal", "net.py"], "net.py", READ),
    "a journal": (["sweep", "g.graph.json", "-o", "r.json", "--journal", "r.json"], "r.json", TWICE),
    "rows": (["sweep", "g.graph.json", "-o", "r.json", "-o", "./r.json"], "r.json", TWICE),
    "notes": (["sweep", "g.graph.json", "--bandwidth", "1GB/s", "--journal", "notes.txt"], "notes.txt", "no journal"),
    "a long name": (["compile", "net.py", "-o", "n" * 256], "n" * 256, "cannot be written (File name too long)"),
    "a folder": (["inspect", "g.graph.json", "--export", "dot", "-o", "."], ".", "is a directory"),
}


@pytest.mark.parametrize("name", LOST)
def test_nothing_is_overwritten_without_a_word(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One line that names the file, before any work, and each file is as it was."""
    before = {path: path.read_bytes() for path in Path().iterdir()}
    arguments, expected, why = LOST[name]
    assert run(arguments) == EXIT_BAD_INPUT
    captured = capfd.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1, captured.err
    assert captured.err.startswith(f"checkflow: {expected}: ") and why in captured.err
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_figure_does_not_overwrite_a_schedule(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the schedule is called."""
    pytest.importorskip("matplotlib")
    Path("s.schedule.json").rename("s.svg")
    assert run(["simulate", "s.svg", "--mtbf", "3h", "--figure", "s.svg"]) == EXIT_BAD_INPUT
    assert READ in capfd.readouterr().err
    assert Path("s.svg").read_text() == "what s.schedule.json says\n"


def test_a_bundled_name_is_no_file(capfd: pytest.CaptureFixture[str]) -> None:
    """A file that is called as a network or a device is, is not read for it, and may be written."""
    Path("alexnet").touch()
    Path("h100").touch()
    for name in ("alexnet", "h100"):
        arguments = ["compile", "alexnet", "--device", "h100", "--set", "nothing=1", "-o", name]
        assert run(arguments) == EXIT_BAD_INPUT
        assert "nothing" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["out[v1].json", "a[/b].json", ":warning:.json"])
def test_a_path_is_shown_as_it_is(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup, and words between colons no emoji."""
    output = Path(name)
    output.parent.mkdir(exist_ok=True)
    arguments = ["compile", "g.graph.json", "--bandwidth", "63GB/s", "-o", name]
    assert run(arguments) == EXIT_DONE
    assert capfd.readouterr().out.endswith(f"\n\nschedule: {name}\n")
    assert output.exists()


ELSEWHERE = """
import os
import torch
import checkflow

os.chdir("elsewhere")

def training(batch_size: int = 4) -> checkflow.Training:
    os.chdir("deeper")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def iteration():
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkflow.Training(model, optimizer, iteration)
"""
MOVED = {
    "compile": (["-o", "o.json", "--report", "r.html", "--trace-out", "t.json"], {"o.json", "r.html", "t.json"}),
    "compile, unnamed": ([], {"moves.schedule.json"}),
    "trace": (["-o", "o.json"], {"o.json"}),
    "sweep": (["-o", "o.csv", "--device", "h100", "--jobs", "1"], {"o.csv", "o.journal.jsonl"}),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_model_file_that_changes_the_working_directory_does_not_move_what_is_written(name: str) -> None:
    """It lies below the directory in which the command was typed."""
    Path("moves.py").write_text(ELSEWHERE)
    Path("elsewhere/deeper").mkdir(parents=True)
    here, before = Path.cwd(), set(Path().iterdir())
    arguments, expected = MOVED[name]
    assert run([name.partition(",")[0], "moves.py", *arguments]) == EXIT_DONE
    assert Path.cwd() == here
    assert {str(path) for path in set(Path().iterdir()) - before} == expected
    assert not list(Path("elsewhere/deeper").iterdir())


MADE = {
    "compile": ["compile", "g.graph.json", "--bandwidth", "63GB/s"],
    "trace": ["trace", "g.graph.json", "--device", "h100"],
    "inspect": ["inspect", "g.graph.json", "--export", "dot"],
    "profile": ["profile"],
}


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is as a bundled device."""
    monkeypatch.setattr("checkflow.cli.profile.measure_profile", lambda *_, **__: hardware.load_profile("h100"))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("command", MADE)
def test_an_output_may_be_a_link_or_standard_output(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As the page of commands says: the link stays, and the stream has all that the file has."""
    Path("link").symlink_to("target")
    assert run([*MADE[command], "-o", "link"]) == EXIT_DONE
    assert Path("link").is_symlink()
    capfd.readouterr()
    assert run([*MADE[command], "-o", "/dev/stdout"]) == EXIT_DONE
    assert Path("target").read_text() in capfd.readouterr().out


def test_the_rows_of_a_sweep_go_to_standard_output_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Its files are of two formats, which their names tell apart."""
    assert run(["sweep", "g.graph.json", "-o", "/dev/stdout"]) == EXIT_BAD_INPUT
    assert "has to end in .json or .csv; --json prints the rows" in capfd.readouterr().err


@pytest.mark.parametrize("command", [*MADE.values(), ["sweep", "g.graph.json"], ["export", ".", "--to", "torch"]])
def test_a_dash_is_no_file(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "-o", "-"]) == EXIT_BAD_INPUT
    assert capfd.readouterr().err == (
        "checkflow: --output -: is no file's name; ./- is one, and /dev/stdout is standard output\n"
    )
    assert not Path("-").exists()


OF_NO_USE = {
    "a largest batch that nothing looks for": (["sweep", "g.graph.json", "--up-to", "5"], "--up-to: "),
    "a largest batch of another axis": (["sweep", "g.graph.json", "--find", "interval", "--up-to", "5"], "--up-to: "),
    "a batch beyond all": (["sweep", "g.graph.json", "--find", "batch_size", "--up-to", "9" * 30], "--up-to"),
    "a formulation of a rule": (
        ["sweep", "g.graph.json", "--policy", "checkfreq", "--formulation", "paper"],
        "--formulation: ",
    ),
    "rows of an export": (["inspect", "g.graph.json", "--export", "dot", "--rows", "3"], "--rows: "),
}


@pytest.mark.parametrize("name", OF_NO_USE)
def test_an_option_that_would_be_ignored_is_told(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, expected = OF_NO_USE[name]
    assert run(arguments) == EXIT_BAD_INPUT
    assert expected in capfd.readouterr().err
