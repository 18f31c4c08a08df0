"""Real kills: of the saver at each of its writing system calls, of the trainer at any moment, of both at once."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import runs
from small_store import DIRECT, SMALL, InProcess, newest_whole, silent, stage, trainer_command, until

from checkflow.store.both.lock import StoreLock
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CALLS = ("mkdir", "openat", "fallocate", "pwrite64", "fsync", "rename", "unlink", "rmdir", "sendto")
TRIES = 5  # start-up opens another number of files now and then, and files that are opened are counted
MEMFD = "memfd:checkflow-slots"
log = logging.getLogger(__name__)


def strace() -> str:
    """strace that may trace here; skips where there is none."""
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed; `apt-get install strace` runs this test")
    if subprocess.run([path, "-o", os.devnull, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace processes here (ptrace is not permitted)")
    return path


def traced_python(tmp_path: Path, name: str, options: str) -> str:
    """A program that runs Python below strace, to be the saver's."""
    wrapper = tmp_path / name
    wrapper.write_text(f'#!/bin/sh\nexec {strace()} -f -qq {options} "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def open_handle(store: Path) -> StoreHandle:
    return StoreHandle.open(
        store, [DIRECT], notify=silent, on_error="warn", persist_every=PersistEvery(iterations=1000),
        retention=Retention(last=1),
    )  # fmt: skip


def prepared(store: Path) -> Path:
    """A store with one checkpoint, of iteration 1, and the remains of an older killed saver."""
    saver = InProcess(store, DIRECT)
    saver.persist(1)
    saver.close()
    remains = store / ".incomplete-00000001-iteration-1-0-0"
    remains.mkdir()
    (remains / "model.safetensors").write_bytes(b"half")
    return store


def writing_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each writing system call of one checkpoint's life, as (name, how many of that name came before, plus one).

    A saver has run before, so that none compiles what it imports.
    """
    open_handle(tmp_path / "compiling").close()
    trace = tmp_path / "trace"
    python = traced_python(tmp_path, "counting", f"-o {trace} -e trace={','.join(CALLS)}")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", python)
        handle = open_handle(prepared(tmp_path / "counted"))
        stage(handle, DIRECT, 2)
        handle.close()
    found: list[tuple[str, int]] = []
    seen: Counter[tuple[str, str]] = Counter()
    for line in trace.read_text().splitlines():
        match = re.match(r"(\d+) +(\w+)\(", line)
        if match is None:
            continue
        thread, name = match.groups()
        seen[thread, name] += 1  # strace counts each thread's calls apart
        if name != "openat" or "O_CREAT" in line:
            found.append((name, seen[thread, name]))
    return list(dict.fromkeys(found))


def test_the_saver_is_killed_at_each_writing_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old or the new checkpoint is restored, whole; the next saver makes the new one durable and tidies up."""
    calls = writing_calls(tmp_path, monkeypatch)
    assert len(calls) > 20
    assert {name for name, _ in calls} == set(CALLS)
    chosen = calls if NIGHTLY else random.Random(0).sample(calls, 10)
    restored: Counter[int] = Counter()
    for name, number in chosen:
        iteration = next(filter(None, (killed_at(tmp_path, monkeypatch, name, number) for _ in range(TRIES))), None)
        assert iteration is not None, f"{name} {number} was not reached in {TRIES} lives"
        restored[iteration] += 1
    log.info("killed at %d of %d writing calls; restored then: %s", len(chosen), len(calls), dict(restored))


def killed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> int | None:
    """The iteration that is restored after a kill at a system call; None where the saver did not come to it."""
    store = prepared(tmp_path / f"{name}-{number}")
    options = f"-o {os.devnull} -e trace={name} -e inject={name}:signal=SIGKILL:when={number}"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", traced_python(tmp_path, "killing", options))
        handle = open_handle(store)
        stage(handle, DIRECT, 2)
        handle.persist_now()
        saver = handle.saver_pid
        assert saver is not None
        until(lambda: not runs(saver) or idle(handle), "it is killed")
        killed = not runs(saver)
    durable = handle.shared.durable_sequence == 1
    iteration = newest_whole(store, DIRECT)
    assert iteration == 2 or (iteration == 1 and not durable), (name, number)
    assert handle.drain(60)
    handle.close()
    assert newest_whole(store, DIRECT) == 2
    assert not [path.name for path in store.iterdir() if path.name.startswith((".incomplete", ".pruned"))]
    shutil.rmtree(store)
    return iteration if killed else None


def idle(handle: StoreHandle) -> bool:
    """Whether a saver that was meant to die has long done its work: start-up made another number of calls."""
    before = handle.shared.progress
    if handle.shared.durable_sequence == 0:
        return False
    time.sleep(2)
    return handle.shared.progress == before


TRAINER = """
import pathlib, time
from small_store import *
from checkflow.store.trainer.persist_every import PersistEvery
store, when_full, iterations = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
start = newest_whole(store) if store.exists() else 0
handle = StoreHandle.open(
    store, [SMALL], when_full=when_full, persist_every=PersistEvery(iterations=iterations), notify=silent
)
print("saver", handle.saver_pid, flush=True)
for iteration in range(start + 1, 100_000):
    stage(handle, SMALL, iteration)
    handle.poll()
    print("staged", iteration, handle.status().durable_iteration or 0, flush=True)
"""


@pytest.mark.parametrize("both", [False, True], ids=["trainer", "trainer and saver"])
@pytest.mark.parametrize("when_full", ["skip", "wait"])
def test_the_trainer_is_killed_at_any_moment(tmp_path: Path, when_full: str, both: bool) -> None:
    """What it had staged is restored, whole; if its saver dies with it, what was durable."""
    choose = random.Random(0)
    store = tmp_path / "store"
    lost: Counter[int] = Counter()
    before = 0
    for _ in range(50 if NIGHTLY else 6):
        every = 10 if both else choose.choice([1, 10, 1000])
        command = trainer_command(TRAINER, store, when_full, every)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            saver = int(trainer.stdout.readline().split()[1])
            for _ in range(choose.randrange(1, 60)):
                trainer.stdout.readline()
            time.sleep(choose.random() * 0.01)
            trainer.kill()
            if both:
                os.kill(saver, signal.SIGKILL)
            said = trainer.stdout.read().split("\n")
        until(lambda: not runs(saver), "the saver ends")  # noqa: B023
        StoreLock.acquire(store, silent, timeout_s=60).close()
        restored = newest_whole(store)
        told = [tuple(map(int, line.split()[1:])) for line in said if re.fullmatch(r"staged \d+ \d+", line)]
        staged, durable = told[-1] if told else (before, before)
        assert restored >= max(before, durable)
        if not both:
            assert restored >= staged
        lost[max(0, staged - restored)] += 1
        before = restored
    log.info("%s: completed iterations lost in each kill: %s", when_full, dict(lost))


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    """No process, no lock, no memory: the saver ends by itself, and a new trainer can start."""
    command = trainer_command(TRAINER, tmp_path / "store", "skip", 10)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        saver = int(trainer.stdout.readline().split()[1])
        until(lambda: MEMFD in _text(Path(f"/proc/{saver}/maps")), "the saver runs")
        (segment,) = {line.split()[4] for line in _text(Path(f"/proc/{saver}/maps")).splitlines() if MEMFD in line}
        trainer.kill()
    until(lambda: not runs(saver), "the saver ends")
    with StoreHandle.open(tmp_path / "store", [SMALL], notify=silent):
        pass
    lines = [line for maps in Path("/proc").glob("[0-9]*/maps") for line in _text(maps).splitlines() if MEMFD in line]
    assert not [line for line in lines if line.split()[4] == segment]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("pwrite64", "ENOSPC"),
        ("fallocate", "ENOSPC"),
        ("fsync", "EIO"),
        ("rename", "EIO"),
        ("mkdir", "EROFS"),
    ],
)
def test_the_kernel_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: str) -> None:
    """A real saver whose system call fails: one clear line, and the old checkpoint stays."""
    python = traced_python(
        tmp_path, "failing", f"-o {os.devnull} -e trace={call} -e inject={call}:error={error}:when=1+"
    )
    store = prepared(tmp_path / "store")
    shutil.rmtree(store / ".incomplete-00000001-iteration-1-0-0")
    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", python)
        handle = StoreHandle.open(store, [DIRECT], notify=told.append, on_error="warn", retry_s=0)
    assert stage(handle, DIRECT, 2)
    assert not handle.drain(60)
    assert "iteration 2 cannot be made durable" in told[0]
    assert newest_whole(store, DIRECT) == 1
    handle.close()
    assert newest_whole(store, DIRECT) == 1


def test_the_kernel_refuses_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk that is no more: training hears of it, and goes on."""
    python = traced_python(
        tmp_path, "failing", f"-o {os.devnull} -e trace=fallocate -e inject=fallocate:error=ENOSPC:when=1..3"
    )
    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", python)
        handle = StoreHandle.open(prepared(tmp_path / "store"), [DIRECT], notify=told.append)
    assert stage(handle, DIRECT, 2)
    assert handle.drain(60)
    handle.close()
    assert newest_whole(tmp_path / "store", DIRECT) == 2
    assert ["tried again for 600 s; free space" in told[0], "durable again" in told[1], len(told)] == [True, True, 2]
