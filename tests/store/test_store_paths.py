"""Odd paths of stores, and who may hold one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from small_store import SMALL, InProcess, newest_whole, silent, stage

from checkflow.cli import run
from checkflow.dtypes import CODES
from checkflow.errors import StoreBusyError, StoreError
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.messages import FailedReport, encode
from checkflow.store.both.saver_log import LOG, take_log
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.trainer.handle import StoreHandle


def test_a_path_need_not_be_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is written to, read, and shown by its bytes."""
    store = tmp_path / os.fsdecode(b"st\xffre")
    with StoreHandle.open(store, [SMALL], notify=silent) as handle:
        assert stage(handle, SMALL, 1)
    assert newest_whole(store) == 1
    assert run(["list", str(store)]) == run(["check", str(store)]) == run(["check", str(store), "--repair"]) == 0
    assert run(["export", str(store), "--to", "torch", "-o", str(store) + ".pt"]) == 0
    assert "st\\xffre.pt: 00000001-iteration-1, verified" in capsys.readouterr().out


class Full(LocalDisk):
    """Without room."""

    def make_directory(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_an_error_of_the_saver_names_such_a_path(tmp_path: Path) -> None:
    """And can be sent."""
    saver = InProcess(tmp_path / os.fsdecode(b"st\xffre"), disk=Full())
    assert saver.persister.write(saver.take(1)) is None
    assert all(b"st\\\\xffre: " in encode(report) for report in saver.reports) and saver.reports
    saver.close()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "loop/store", "file/store"])
def test_what_can_be_no_store_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="choose another"):
        StoreHandle.open(tmp_path / name, [SMALL], notify=silent)
    for command in (
        () if "\0" in name else ("list", "check", "check --repair", "export --to torch -o", "export -o x --to")
    ):
        capsys.readouterr()
        last = [str(tmp_path / name)] if command.endswith("-o") else ["torch"] if command.endswith("--to") else []
        assert run([*command.split(), *last, str(tmp_path / name)]) == 2
        assert "internal" not in capsys.readouterr().err


def test_without_proc_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkflow.store.both.lock._OWN_FDS", tmp_path / "fd")
    with pytest.raises(StoreError, match=r"store: /proc is not mounted, .*; mount it"):
        StoreHandle.open(tmp_path / "store", [SMALL], notify=silent)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("folder", "lock"), [(0o755, 0o600), (0o700, 0o600), (0o775, 0o660), (0o777, 0o666)])
def test_a_lock_is_for_those_who_may_write_to_the_store(folder: int, lock: int, tmp_path: Path) -> None:
    """Whoever can read it can hold it. One that was for all, from before, no longer is."""
    (tmp_path / "lock").touch(0o644)
    (tmp_path / "lock").chmod(0o644)
    tmp_path.chmod(folder)
    StoreLock.acquire(tmp_path, silent).close()
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == lock


def test_who_has_it_already_is_told_so(tmp_path: Path) -> None:
    """As in a notebook whose cell runs again."""
    with (
        StoreHandle.open(tmp_path, [SMALL], notify=silent),
        pytest.raises(StoreBusyError, match=r"that is this process: close\(\) the Checkpointer that it has"),
    ):
        StoreHandle.open(tmp_path, [SMALL], notify=silent)


def test_a_directory_with_a_serial_beyond_any_ends_no_saver(tmp_path: Path) -> None:
    """It is no checkpoint's name. One that leaves no number after it is an error that names it."""
    saver = InProcess(tmp_path / "store")
    (tmp_path / "store" / "99999999999999999-iteration-3").mkdir()
    saver.persist(1)
    assert newest_whole(tmp_path / "store") == 1
    (tmp_path / "store" / "1000000000000000-iteration-3").mkdir()
    other = InProcess(tmp_path / "store")
    assert other.persister.write(other.take(2)) is None
    (failed,) = other.reports
    assert isinstance(failed, FailedReport) and "remove or rename it: 1000000000000000-iteration-3" in failed.message
    saver.close()
    other.close()


def told(store: Path) -> tuple[str, ...]:
    fd = os.open(store, os.O_RDONLY)
    try:
        return take_log(store, fd)
    finally:
        os.close(fd)


def test_a_log_of_many_lines_is_told_in_short(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b"\x1b[31m\xff" + b"x" * 5000 + b"\n" + b"y\n" * 99)
    first, *lines, last = told(tmp_path)
    assert first.startswith("\\x1b[31m\ufffdxxx") and len(first) < 1000
    assert lines == ["y"] * 19 and last == "... and 80 lines more"
    assert told(tmp_path) == ()


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    (tmp_path / LOG).symlink_to(outside)
    (line,) = told(tmp_path)
    assert "is a link" in line and "secret" not in line


def test_every_dtype_can_be_exported(tmp_path: Path) -> None:
    """Also those that safetensors' own reader lacks, and tensors without an element."""
    tensors = tuple(TensorSpec(name, code, (2, 3)) for name, code in CODES.items())
    empty = tuple(TensorSpec(f"empty.{name}", code, (0,)) for name, code in CODES.items())
    saver = InProcess(tmp_path / "store", Layout.of((FileSpec("model.safetensors", (*tensors, *empty)),)))
    saver.persist(1)
    saver.close()
    assert run(["export", str(tmp_path / "store"), "--to", "torch", "-o", str(tmp_path / "x.pt")]) == 0
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)["model"]
    for name in CODES:
        assert (loaded[name].dtype, loaded[name].shape) == (getattr(torch, name), (2, 3))
        assert (loaded[f"empty.{name}"].dtype, loaded[f"empty.{name}"].shape) == (getattr(torch, name), (0,))
        assert bytes(loaded[name].view(torch.uint8).flatten().tolist()) == b"\x01" * 6 * getattr(torch, name).itemsize


def test_a_path_that_the_system_refuses_is_told_without_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the system's errors only the words are for a person."""

    def refuse(path: Path) -> Path:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "resolve", refuse)
    with pytest.raises(StoreError) as raised:
        StoreHandle.open(tmp_path, [SMALL], notify=silent)
    assert str(raised.value) == f"store: {tmp_path} is no path of a directory (Permission denied); choose another"
