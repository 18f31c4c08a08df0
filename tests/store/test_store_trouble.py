"""A disk that refuses for a while, with the trainer alive or dead; savers that die; and what is said of it."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import children, refusing, runs
from small_store import (
    SMALL,
    InProcess,
    newest_whole,
    saver_of,
    silent,
    stage,
    stop,
    trainer_command,
    until,
    until_verified,
)

from checkflow.errors import InputError, StoreError
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.messages import DurableReport, FailedReport, Notice, VerifiedReport
from checkflow.store.both.retry import MOST_DELAY_S
from checkflow.store.both.saver_log import LOG, take_log, write_log
from checkflow.store.format import disk as disk_module
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.reader import Checkpoint, list_checkpoints
from checkflow.store.memory.saver_slots import take_due
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

EACH = PersistEvery(iterations=1)


def test_a_disk_that_refuses_for_a_moment_ends_no_training(tmp_path: Path) -> None:
    """Under "raise", too: it is told once, tried again, and told once more when it works."""
    told: list[str] = []
    with StoreHandle.open(tmp_path, [SMALL], notify=told.append, persist_every=EACH) as handle:
        with refusing(saver_of(handle)):
            for iteration in range(1, 6):
                assert stage(handle, SMALL, iteration)

            def tried() -> bool:
                handle.poll()
                return bool(told)

            until(tried, "it is told")
            assert handle.status().durable_iteration is None
        assert handle.drain(60)
        assert handle.status().errors == 0
    assert newest_whole(tmp_path) == 5
    assert "cannot be made durable (File too large), and is tried again for 600 s" in told[0]
    assert "checkpoints are made durable again, after " in told[1]
    assert len(told) == 2


def test_a_promise_that_is_broken_is_an_error(tmp_path: Path) -> None:
    """After `retry_s` of trouble, not before; checkpoints go on being staged meanwhile, with two slots as well."""
    handle = StoreHandle.open(tmp_path, [SMALL], slots=2, notify=silent, persist_every=EACH, retry_s=1.0)
    with refusing(saver_of(handle)):
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"cannot be made durable \(File too large\)"):
            for iteration in range(1, 6000):
                stage(handle, SMALL, iteration)
                handle.poll()
                time.sleep(0.01)
        assert time.monotonic() - began >= 1.0
        status = handle.status()
        assert status.staged > status.skipped
    handle.close()
    assert newest_whole(tmp_path) == handle.status().staged_iteration


def test_what_is_kept_once_it_is_durable_is_waited_for(tmp_path: Path) -> None:
    """It is written once more, which a disk may refuse, too."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=EACH, retry_s=0.1, on_error="warn") as handle:
        for iteration in (1, 2):
            assert stage(handle, SMALL, iteration) and handle.drain(60)
            if iteration == 1:
                assert handle.persist_now(keep=True) is not None and handle.drain(60)
                assert [found.kept for found in whole(tmp_path)] == [True, False]  # newest first
        with refusing(saver_of(handle)):
            assert handle.persist_now(keep=True) is not None and not handle.drain(60)
        assert handle.persist_now(keep=True) is not None and handle.drain(60)
        assert [found.iteration for found in whole(tmp_path) if found.kept] == [2, 1]


def whole(store: Path) -> list[Checkpoint]:
    return [found for found in list_checkpoints(store) if isinstance(found, Checkpoint)]


def test_who_waits_for_a_slot_waits_no_longer_than_that(tmp_path: Path) -> None:
    """Under `wait` nothing is given up before; then it is an error."""
    with StoreHandle.open(
        tmp_path, [SMALL], slots=2, when_full="wait", notify=silent, persist_every=EACH, retry_s=0.5
    ) as handle:
        with refusing(saver_of(handle)), pytest.raises(StoreError, match="iteration 1 cannot be made durable"):
            for iteration in range(1, 10):
                assert stage(handle, SMALL, iteration)
        assert handle.status().staged_iteration == 2
    assert newest_whole(tmp_path) == 2


def test_what_is_given_up_is_told_before_its_slot_is_filled_again(tmp_path: Path) -> None:
    """Also where the trainer has not asked for a while, and finds the slot free at once."""
    with StoreHandle.open(
        tmp_path, [SMALL], slots=2, when_full="wait", notify=silent, persist_every=EACH, retry_s=0.1
    ) as handle:
        with refusing(saver_of(handle)):
            for iteration in (1, 2):
                assert stage(handle, SMALL, iteration)
            until(lambda: not handle.pending, "both are given up")
        with pytest.raises(StoreError, match="iteration 1 cannot be made durable"):
            handle.acquire()
        assert handle.status().staged_iteration == 2
    assert newest_whole(tmp_path) == 2


def test_who_closes_is_told_what_it_waits_for(tmp_path: Path) -> None:
    """While it waits, so that a person can make room."""
    handle = StoreHandle.open(tmp_path, [SMALL], notify=lambda line: make_room(line))
    saver = saver_of(handle)
    limits = resource.prlimit(saver, resource.RLIMIT_FSIZE)
    told: list[str] = []

    def make_room(line: str) -> None:
        told.append(line)
        resource.prlimit(saver, resource.RLIMIT_FSIZE, limits)

    resource.prlimit(saver, resource.RLIMIT_FSIZE, (0, limits[1]))
    assert stage(handle, SMALL, 1)
    handle.close(deadline_s=60)
    assert ["is tried again for" in told[0], "durable again" in told[1], len(told)] == [True, True, 2]
    assert newest_whole(tmp_path) == 1


@pytest.mark.parametrize("is_durable", [False, True])
def test_who_closes_for_long_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool) -> None:
    """A slow disk, or thousands of old checkpoints that go, are nothing to guess at."""
    told: list[str] = []

    def go_on(line: str) -> None:
        told.append(line)
        os.kill(saver, signal.SIGCONT)

    handle = StoreHandle.open(tmp_path, [SMALL], notify=pytest.fail, tell=go_on)
    assert stage(handle, SMALL, 1)
    assert not is_durable or handle.drain(60)
    saver = stop(handle)
    monkeypatch.setattr("checkflow.store.trainer.lingering.PATIENT_S", 0.2)
    handle.close(deadline_s=60)
    why = "what was written is read back, and older checkpoints are removed"
    assert told[0] == f"{tmp_path}: waiting until {why if is_durable else 'the checkpoint of iteration 1 is on disk'}"
    assert newest_whole(tmp_path) == 1


@pytest.mark.parametrize("retry_s", [-1.0, float("nan")])
def test_a_time_that_is_none_is_refused(tmp_path: Path, retry_s: float) -> None:
    with pytest.raises(InputError, match=r"retry_s: .* use 0 or more"):
        StoreHandle.open(tmp_path, [SMALL], notify=silent, retry_s=retry_s)


def test_a_disk_that_is_full_for_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked less and less often, up to each half minute; after ten minutes it is an error; then it works."""
    now = [1000.0]
    monkeypatch.setattr("checkflow.store.both.retry.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Full(LocalDisk):
        tries: list[float] = []  # noqa: RUF012 (one disk)

        def make_directory(self, path: Path) -> None:
            if now[0] < 4600:
                self.tries.append(now[0] - 1000)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().make_directory(path)

    disk = Full()
    saver = InProcess(tmp_path / "store", disk=disk, retry_s=600)
    iteration = 0
    while not any(isinstance(report, DurableReport) for report in saver.reports):
        if not any(word.due for word in saver.shared.words()):
            iteration += 1
            saver.stage(iteration)
        taken = take_due(saver.shared)
        assert taken is not None
        saver.persister.write(taken)
        now[0] += saver.persister.patience.wait_s
    failures = [report for report in saver.reports if isinstance(report, FailedReport)]
    told = [report.message for report in saver.reports if isinstance(report, Notice)]
    assert iteration == 1 + len(failures)
    assert ["tried again for 600 s" in told[0], "again, after 36" in told[1], len(told)] == [True, True, 2]
    assert min(time_s for time_s in disk.tries if time_s >= 600) == 600
    assert len(disk.tries) < 3600 / MOST_DELAY_S + 10
    assert newest_whole(tmp_path / "store") == iteration
    saver.close()


TRAINER = """
import pathlib, time
from small_store import *
from checkflow.store.trainer.persist_every import PersistEvery
handle = StoreHandle.open(
    pathlib.Path(sys.argv[1]), [SMALL], notify=silent, persist_every=PersistEvery(iterations=1000),
    retry_s=float(sys.argv[2])
)
stage(handle, SMALL, 1)
handle.drain(60)
until_verified(handle, 1)
print(handle.saver_pid, flush=True)
for iteration in range(2, int(input()) + 1):
    stage(handle, SMALL, iteration)
print("staged", flush=True)
time.sleep(600)
"""


@contextmanager
def trainer(store: Path, retry_s: float = 600, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A trainer with one durable checkpoint, and its saver's pid."""
    command = trainer_command(TRAINER, store, retry_s)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def go_on(process: subprocess.Popen[str], iterations: int) -> None:
    """Have these staged, with nobody polling from then on."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{iterations}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "staged\n"


def test_a_trainer_dies_while_the_disk_refuses(tmp_path: Path) -> None:
    """The saver still has what was staged: it goes on trying, and nothing is lost, and nobody bothered."""
    with trainer(tmp_path) as (process, saver):
        with refusing(saver):
            go_on(process, 60)
            process.kill()
            process.wait()
            time.sleep(0.5)  # it has tried
            assert runs(saver)
            assert newest_whole(tmp_path) == 1
        until(lambda: not runs(saver), "it is done")
    assert newest_whole(tmp_path) == 60
    told: list[str] = []
    StoreHandle.open(tmp_path, [SMALL], notify=told.append).close()
    assert not told


def test_what_no_disk_took_is_told_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store or, where that does not take it, beside the user's other state; and the saver ends."""
    store, state = tmp_path / "store", tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with trainer(store, 0.3) as (process, saver):
        shutil.rmtree(store)
        go_on(process, 7)
        process.kill()
        until(lambda: not runs(saver), "it gives up")
    assert len(list((state / "checkflow").iterdir())) == 1
    told: list[str] = []
    StoreHandle.open(store, [SMALL], notify=told.append).close()
    (line,) = told
    assert "the previous run's saver could not tell: " in line and "iteration 7 cannot be made durable" in line
    assert not list((state / "checkflow").iterdir())


@pytest.mark.parametrize("moved", [False, True])
def test_a_log_beside_the_store_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    """By the store's path, and by the directory itself where that has another path since; a stranger's is not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = tmp_path / "store"
    (store / LOG).mkdir(parents=True)  # no log goes there
    fd = os.open(store, os.O_RDONLY)
    write_log(store, fd, ["one", "two\x1b[2J"])
    (store / LOG).rmdir()
    other = os.open(tmp_path, os.O_RDONLY)
    assert take_log(tmp_path, other) == ()
    found = take_log(tmp_path / "new", fd) if moved else take_log(store, other)
    assert [line.split(": ")[1] for line in found] == ["one", r"two\x1b[2J"]
    assert take_log(store, fd) == ()
    os.close(fd)
    os.close(other)


def test_a_log_is_not_told_of_the_directory_that_has_a_removed_ones_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many file systems give it to the next directory that is made."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = tmp_path / "store"
    (store / LOG).mkdir(parents=True)
    fd = os.open(store, os.O_RDONLY)
    write_log(store, fd, ["of the removed one"])
    os.close(fd)
    shutil.rmtree(store)
    for name in range(20):
        (tmp_path / str(name)).mkdir()
        fd = os.open(tmp_path / str(name), os.O_RDONLY)
        assert take_log(tmp_path / str(name), fd) == ()
        os.close(fd)


def test_a_folder_that_others_write_to_takes_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody could have put a link or a pipe there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state" / "checkflow").mkdir(parents=True)
    (tmp_path / "state" / "checkflow").chmod(0o777)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store = tmp_path / "store"
    (store / LOG).mkdir(parents=True)
    fd = os.open(store, os.O_RDONLY)
    write_log(store, fd, ["one"])
    assert not list((tmp_path / "state" / "checkflow").iterdir())
    assert len(list((tmp_path / "home" / ".local" / "state" / "checkflow").iterdir())) == 1
    (store / LOG).rmdir()
    assert len(take_log(tmp_path, fd)) == 1
    os.close(fd)


def test_a_saver_is_killed_just_before_its_trainer(tmp_path: Path) -> None:
    """Another one has the memory as soon as the first is gone, whatever the training does."""
    with trainer(tmp_path) as (process, saver):
        go_on(process, 12)
        os.kill(saver, signal.SIGKILL)
        until(lambda: bool(children(process.pid) - {saver}), "another one runs")
        (second,) = children(process.pid) - {saver}
        process.kill()
        process.wait()
        until(lambda: not runs(second), "it is done")
    assert newest_whole(tmp_path) == 12


def test_savers_that_die_are_followed_by_others(tmp_path: Path) -> None:
    """However many; of more than a few in a row a person is told."""
    told: list[str] = []
    with StoreHandle.open(tmp_path, [SMALL], notify=told.append, persist_every=EACH) as handle:
        for _ in range(6):
            saver = saver_of(handle)
            os.kill(saver, signal.SIGKILL)
            until(lambda: handle.saver_pid not in (None, saver), "another one runs")  # noqa: B023
        assert stage(handle, SMALL, 1)
        assert handle.drain(60)
        assert handle.status().restarts == 6
    assert newest_whole(tmp_path) == 1
    assert ["died 4 times in a row (last: signal 9), and is started again" in line for line in told] == [True]


def test_one_more_is_started_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next one would be a while in coming."""
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent)
    assert stage(handle, SMALL, 1)
    handle.drain(60)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        os.kill(saver_of(handle), signal.SIGKILL)
        until(lambda: handle._saver.deaths > 6, "deaths")
    assert stage(handle, SMALL, 2)
    began = time.monotonic()
    handle.close()
    assert newest_whole(tmp_path) == 2
    assert time.monotonic() - began < 30


def test_a_checkpoint_that_somebody_removes_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    saver = InProcess(tmp_path)
    written = saver.persister.write(saver.take(1))
    assert written is not None
    shutil.rmtree(tmp_path / written.name)
    saver.persister.settle([written])
    said = saver.reports[-1]
    assert isinstance(said, FailedReport) and "was removed before it was read back" in said.message
    assert "disk" not in said.message
    saver.close()


def test_a_savers_last_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote to its standard error, however much that was."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nyes 2>/dev/null | head -c 50000 >&2\necho >&2\necho 'ImportError: no numpy' >&2\nexit 3\n"
    )
    python.chmod(0o755)
    handle = StoreHandle.open(tmp_path / "store", [SMALL], notify=silent, retry_s=0)
    monkeypatch.setattr(sys, "executable", str(python))
    os.kill(saver_of(handle), signal.SIGKILL)
    until(lambda: bool(handle._saver.news), "it is seen")
    with pytest.raises(StoreError, match=r"\(last: exit code 3: ImportError: no numpy\)"):
        handle.poll()
    handle.close()


def test_an_interrupted_call_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python makes its own again."""

    class Interrupted:
        calls = 0

        def fallocate(self, *_: object) -> int:
            self.calls += 1
            ctypes.set_errno(errno.EINTR)
            return -1 if self.calls < 3 else 0

        sync_file_range = fallocate

    calls = Interrupted()
    monkeypatch.setattr(disk_module, "LIBC", calls)
    with (tmp_path / "file").open("w") as file:
        LocalDisk().allocate(file.fileno(), 4096)
        assert calls.calls == 3
        calls.calls = 0
        LocalDisk().write_back(file.fileno(), wait=True)
        assert calls.calls == 3


def test_pruning_that_fails_is_tried_again(tmp_path: Path) -> None:
    """No promise is broken by one checkpoint too many: it is told once, and the next one prunes both."""

    class Sticky(LocalDisk):
        sticks = True

        def rename(self, source: Path, target: Path) -> None:
            if self.sticks and target.name.startswith(".pruned"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().rename(source, target)

    disk = Sticky()
    saver = InProcess(tmp_path / "store", disk=disk)
    for iteration in range(1, 6):
        saver.persist(iteration)
    told = [report for report in saver.reports if not isinstance(report, DurableReport | VerifiedReport)]
    assert [type(report) for report in told] == [Notice]
    disk.sticks = False
    saver.persist(6)
    assert len(list(saver.store.iterdir())) == 2
    saver.close()


def test_the_store_is_free_after_all_of_it(tmp_path: Path) -> None:
    """A trainer and its saver that are killed together leave no lock; what is durable is what is left."""
    with trainer(tmp_path) as (process, saver):
        go_on(process, 12)
        os.kill(process.pid, signal.SIGSTOP)  # so that it starts no other one: both are gone at once
        os.kill(saver, signal.SIGKILL)
        process.kill()
        process.wait()
    StoreLock.acquire(tmp_path, silent, timeout_s=60).close()
    assert newest_whole(tmp_path) == 1
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
        assert stage(handle, SMALL, 2)
        until_verified(handle, 1)
