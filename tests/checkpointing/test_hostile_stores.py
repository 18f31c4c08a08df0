"""Whatever a store has in its names and files, its readers end, with an exit code and short plain lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_stores import ATTACKS, NEWEST, readers
from once import once
from test_attach import attached, compiled, small

from checkflow.schedule import write_schedule

LINE = 1000  # characters
READERS = tuple(readers(Path("store"), Path("schedule.json")))
UNUSABLE = {f"lock is {kind}" for kind in ("a pipe", "a socket", "a folder", "a link", "a loop")}  # nobody can train
FULL = {"the last serial"}  # nothing can be saved
HARMLESS = ("log", "checkpoint", "leftover", "nasty", "bytes", "a name", "a serial", "an iteration", "a log", "a lock")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good store of iterations 2 and 3, attacked in every way, and all that its readers said."""
    return once(tmp_path_factory, "hostile", attack) / "attacked"


def attack(folder: Path) -> None:
    schedule, training = compiled(small), small()
    write_schedule(folder / "schedule.json", schedule)
    with attached(training, schedule, folder / "good") as ckpt:
        for _ in range(3):
            training.iteration()
            ckpt.step()
    assert (folder / "good" / NEWEST).is_dir()
    (folder / "attacked").mkdir()
    outside = folder / "outside"
    outside.write_text("mine")
    script = [sys.executable, str(Path(__file__).parent / "hostile_stores.py")]
    arguments = [folder / "good", folder / "schedule.json", folder / "attacked"]
    environment = os.environ | {"OUTSIDE": str(outside), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([*script, *map(str, arguments)], check=True, timeout=3000, env=environment)
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("name", ATTACKS)
def test_readers_end_with_a_code_and_plain_lines(name: str, results: Path) -> None:
    """No traceback, no hang, no control character, no line that nobody could read."""
    for reader in READERS:
        output = (results / f"{name}.{reader}.out").read_bytes().decode()  # UTF-8
        assert (results / f"{name}.{reader}.code").read_text() in ("0", "1", "2"), (reader, output)
        assert "Traceback" not in output and "internal error" not in output, (reader, output)
        for line in output.split("\n"):
            assert not [c for c in line if not c.isprintable()], (reader, line)
            assert len(line) < LINE or reader == "json", (reader, line)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_whole_is_found(name: str, results: Path) -> None:
    """What somebody put beside the checkpoints hides none of them, and the training goes on."""
    output = (results / f"{name}.attach.out").read_text()
    if name in UNUSABLE:
        assert "cannot be opened" in output and "remove it, and a new one is made" in output
    elif name.startswith(HARMLESS):
        assert "restored 3" in output
        assert ("saved" in output) == (name not in FULL)


@pytest.mark.parametrize("name", ATTACKS)
def test_check_and_export_agree(name: str, results: Path) -> None:
    """Where the newest is called verified it can be exported; where not, an older one is."""
    verified = f"{NEWEST}: verified" in (results / f"{name}.check.out").read_text()
    for target in ("safetensors", "torch"):
        exported = f"{NEWEST}, verified, as {target}" in (results / f"{name}.{target}.out").read_text()
        assert exported == verified
