"""checkflow export: whole, durable and of a new name, or not at all, whoever else writes beside it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_store import InProcess

from checkflow.cli import export, run
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE
from checkflow.store.format.reader import Loaded

TARGETS = ("safetensors", "torch", "dcp")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a store of one checkpoint."""
    monkeypatch.chdir(tmp_path)
    saver = InProcess(tmp_path / "store")
    saver.persist(3)
    saver.close()


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("target", TARGETS)
def test_a_full_disk_is_one_line(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what to do, not where in torch it went wrong, and nothing is left."""
    with full_disk():
        assert run(["export", "store", "--to", target, "-o", "out"]) == EXIT_BAD_INPUT
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "cannot" in each or "Error" in each)
    assert line.removeprefix("checkflow: --output out: cannot be written ") in (
        "(File too large); allow larger files (ulimit -f), or choose another",
        "(the disk may be full); free space, or choose another",
    )
    assert not any(word in line for word in ("Traceback", "enforce", "Errno", "RANK"))
    assert names() == ["store"]


@pytest.mark.parametrize("target", TARGETS)
def test_what_others_left_stays_and_is_in_no_export(target: str) -> None:
    """A folder of any name beside the output is not ours."""
    Path(".out.partial").mkdir()
    Path(".out.partial/theirs").write_text("theirs")
    assert run(["export", "store", "--to", target, "-o", "out"]) == EXIT_DONE
    assert Path(".out.partial/theirs").read_text() == "theirs"
    assert not Path("out/theirs").exists()
    assert names() == [".out.partial", "out", "store"]


@pytest.mark.parametrize("target", TARGETS)
def test_of_two_exports_to_one_name_the_first_stays(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one, which began before there was anything, is refused, and neither takes the other's work."""
    write = export._WRITERS[target]
    first: list[int] = []
    began: list[Path] = []

    def meanwhile(loaded: Loaded, path: Path) -> None:
        write(loaded, path)
        if not began:
            began.append(path)
            assert run(["export", "store", "--to", target, "-o", "out"]) == EXIT_DONE
            assert path.exists()
            first.append(Path("out").stat().st_ino)

    monkeypatch.setitem(export._WRITERS, target, meanwhile)
    assert run(["export", "store", "--to", target, "-o", "out"]) == EXIT_BAD_INPUT
    assert "--output out: exists; choose a new name" in capsys.readouterr().err
    assert [Path("out").stat().st_ino] == first
    assert names() == ["out", "store"]


@pytest.mark.parametrize("target", TARGETS)
def test_all_is_durable_before_it_has_its_name(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, the folders that have them, and last the name itself."""
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, Path("out").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert run(["export", "store", "--to", target, "-o", "out"]) == EXIT_DONE
    before = {number for number, is_there in synced if not is_there}
    assert {path.stat().st_ino for path in (Path("out"), *Path("out").rglob("*"))} <= before
    assert synced[-1] == (Path().stat().st_ino, True)


@pytest.mark.parametrize("target", TARGETS)
def test_a_name_may_be_as_long_as_the_file_system_has_them(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is longer is told before anything is read."""
    assert run(["export", "store", "--to", target, "-o", "n" * 255]) == EXIT_DONE
    assert names() == ["n" * 255, "store"]
    capsys.readouterr()
    assert run(["export", "store", "--to", target, "-o", "n" * 256]) == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"checkflow: --output {'n' * 256}: cannot be written (File name too long); choose another"
