"""What runs beside the training is killed when the training ends: what it was doing is done all the same, or told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import HANGS_S, Program

import checkflow
from checkflow.store.both.beside import Beside, start_beside
from checkflow.store.both.words import CLOSE, LAST, NOW
from checkflow.store.bucket.names import BucketContents, iteration_of
from checkflow.store.bucket.objects import Objects
from checkflow.store.format.reader import newest
from checkflow.store.trainer import bucket_process
from checkflow.store.trainer.bucket_process import BucketProcess
from checkflow.store.trainer.saver_process import SaverProcess

ITERATIONS = 3
LONG_S = 60.0


def trained(tmp_path: Path, told: list[str], *, bucket: bool = True, retry_s: float = LONG_S) -> checkflow.Checkpointer:
    """Three iterations of a training, of which none need be in the bucket yet."""
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = checkflow.attach(
        model, optimizer, store=tmp_path / "store", bucket=f"file://{tmp_path}/bucket" if bucket else None,
        notify=told.append, tell=lambda _: None, retry_s=retry_s,
    )  # fmt: skip
    if bucket:
        os.kill(uploader_of(ckpt).pid, signal.SIGSTOP)  # it is killed before it has done anything
    for _ in range(ITERATIONS):
        torch.autograd.backward(model(torch.randn(4, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    return ckpt


def uploader_of(ckpt: checkflow.Checkpointer) -> BucketProcess:
    assert ckpt._behind is not None and ckpt._behind._process is not None
    return ckpt._behind._process


def newest_in_bucket(tmp_path: Path) -> int | None:
    names = BucketContents.of(Objects.open(f"file://{tmp_path}/bucket").sizes()).newest_first
    return iteration_of(names[0]) if names else None


def kills_at(monkeypatch: pytest.MonkeyPatch, of: type, method: str, is_due: Callable[..., bool]) -> list[int]:
    """Whose `method` is called and `is_due` is killed right before that, once; its number is in what is returned."""
    killed, call = list[int](), getattr(of, method)

    def called(self: BucketProcess | SaverProcess, *arguments: object) -> None:
        if not killed and is_due(*arguments):
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        call(self, *arguments)

    monkeypatch.setattr(of, method, called)
    return killed


@pytest.mark.parametrize("moment", ["before close()", "when it is told to end", "while it is waited for"])
def test_an_uploader_that_is_killed_at_the_end_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    told: list[str] = []
    ckpt = trained(tmp_path, told)
    if moment == "before close()":
        os.kill(uploader_of(ckpt).pid, signal.SIGKILL)
    elif moment == "when it is told to end":
        kills_at(monkeypatch, BucketProcess, "_say", lambda word: word == CLOSE)
    else:
        kills_at(monkeypatch, BucketProcess, "_stirs", lambda _: True)
    ckpt.close()
    assert newest_in_bucket(tmp_path) == ITERATIONS
    assert told[0].endswith("the uploader died (signal 9), and is started again; check memory limits")


@pytest.mark.parametrize("method", ["_say", "_stirs"])
def test_one_that_is_killed_while_sigterm_waits_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    told: list[str] = []
    with trained(tmp_path, told) as ckpt:
        ckpt.save()
        killed = kills_at(monkeypatch, BucketProcess, method, lambda what: what == LAST or method == "_stirs")
        assert uploader_of(ckpt).wait(time.monotonic() + LONG_S)
        assert killed and newest_in_bucket(tmp_path) == ITERATIONS


def test_what_no_uploader_brings_to_the_bucket_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried for retry_s, and the disk has it."""
    told: list[str] = []
    ckpt = trained(tmp_path, told, retry_s=0.2)

    def dies(_: str, *arguments: object) -> Beside:
        return start_beside("checkflow.no_such_module", *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bucket_process, "start_beside", dies)
    os.kill(uploader_of(ckpt).pid, signal.SIGKILL)
    ckpt.close()
    begins, ends = told
    assert "died (signal 9), and is started again" in begins
    assert ends.endswith(
        f"may not have iteration {ITERATIONS}: the uploader died (exit code 1); the disk has it, and the next run "
        "uploads it"
    )
    assert newest_in_bucket(tmp_path) is None


def test_where_no_other_can_be_started_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    ckpt = trained(tmp_path, told, retry_s=0.2)

    def refused(*_: object) -> Beside:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(bucket_process, "start_beside", refused)
    os.kill(uploader_of(ckpt).pid, signal.SIGKILL)
    ckpt.close()
    begins, ends = told
    assert "and no other can be started, which is tried again: bucket: no uploader can be started (" in begins
    assert f"may not have iteration {ITERATIONS}: the uploader died (signal 9)" in ends


@pytest.mark.parametrize("word", [LAST, NOW, CLOSE])
def test_a_saver_that_is_killed_at_the_end_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    told: list[str] = []
    ckpt = trained(tmp_path, told, bucket=False)
    killed = kills_at(monkeypatch, SaverProcess, "tell", lambda said: said == word)
    ckpt.close()
    found = newest(tmp_path / "store").checkpoint
    assert killed and found is not None and found.iteration == ITERATIONS and not told


UNHEARD = """
import os, signal, subprocess, sys
import torch, checkflow
from pathlib import Path
from checkflow.store.both.beside import Beside
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
ended = Beside(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
assert ended.wait(60)
print(ended.exit_code, ended.how_it_ended(), flush=True)
told = []
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = checkflow.attach(model, optimizer, store=sys.argv[1], bucket=sys.argv[2], notify=told.append)
os.kill(ckpt._behind._process.pid, signal.SIGSTOP)
model(torch.randn(4, 6)).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
ckpt.step()
os.kill(ckpt._behind._process.pid, signal.SIGKILL)
os.kill(ckpt._handle.saver_pid, signal.SIGKILL)
ckpt.close()
print(*told, sep="\\n", flush=True)
"""


def test_an_exit_code_that_nobody_has_seen_is_none(tmp_path: Path) -> None:
    """SIGCHLD is ignored, and the system collects who ends: that is no success."""
    process = Program(UNHEARD, str(tmp_path / "store"), f"file://{tmp_path}/bucket", stderr=tmp_path / "said")
    assert process.has_ended(HANGS_S)
    code, said = process.end()
    assert code == 0, process.complaint()
    first, *told = said.splitlines()
    assert first == "None exit code unknown"
    assert any("the uploader died (exit code unknown), and is started again" in line for line in told)
    assert newest_in_bucket(tmp_path) == 1


def test_an_exit_code_is_known_where_it_was_seen() -> None:
    for what, how in (("raise SystemExit(3)", "exit code 3"), ("import os; os.kill(os.getpid(), 9)", "signal 9")):
        process = Beside(subprocess.Popen([sys.executable, "-c", what]))
        assert process.wait(LONG_S) and process.how_it_ended() == how
        process.kill()
