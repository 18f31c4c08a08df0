"""A trainer's handle with a real saver process: what is staged, durable, verified, and what is said when it is not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_store import SMALL, fill, gone, newest_whole, record_of, silent, stage, trainer_command, until

from checkflow.errors import InputError, StoreBusyError, StoreError
from checkflow.store.handle import StoreHandle
from checkflow.store.lock import StoreLock
from checkflow.store.pace import Pace, PersistEvery
from checkflow.store.reader import Checkpoint, list_checkpoints
from checkflow.store.retention import Retention
from checkflow.store.saver import LOG

EACH = PersistEvery(iterations=1)


def saver_of(handle: StoreHandle) -> int:
    assert handle.saver_pid is not None
    return handle.saver_pid


def until_verified(handle: StoreHandle, count: int) -> None:
    """Until the saver has nothing more to do."""

    def verified() -> bool:
        handle.poll()
        return handle.status().verified == count

    until(verified, "it is verified")


def until_idle(handle: StoreHandle) -> None:
    """Until all that is due is durable and verified."""

    def verified() -> bool:
        handle.poll()
        status = handle.status()
        return not handle.pending and status.verified == status.durable

    until(verified, "nothing is pending")


@contextmanager
def stopped(handle: StoreHandle) -> Iterator[None]:
    """The saver does nothing here."""
    saver = saver_of(handle)
    os.kill(saver, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(saver, signal.SIGCONT)


def test_a_run_and_what_it_leaves(tmp_path: Path) -> None:
    """Staged, durable and verified are counted apart; after close the newest is on disk and the saver is gone."""
    store = tmp_path / "deep" / "store"
    with StoreHandle.open(store, SMALL, notify=silent) as handle:
        saver = saver_of(handle)
        for iteration in range(1, 6):
            assert stage(handle, SMALL, iteration)
            handle.poll()
        assert handle.status().staged_iteration == 5
    status = handle.status()
    assert (status.staged, status.durable_iteration, status.verified_iteration, status.lag_iterations) == (5, 5, 5, 0)
    assert status.written_bytes > 0 and status.write_bytes_per_s > 0
    assert gone(saver)
    assert newest_whole(store) == 5
    assert sorted(path.name for path in store.iterdir() if "iteration" not in path.name) == ["lock"]
    handle.close()  # again is nothing


def test_drain_is_durable(tmp_path: Path) -> None:
    """After drain the newest staged checkpoint is restored, while the handle is open."""
    with StoreHandle.open(tmp_path, SMALL, notify=silent, persist_every=PersistEvery(iterations=1000)) as handle:
        for iteration in (1, 2, 3):
            assert stage(handle, SMALL, iteration)
            assert handle.drain(60)
            assert newest_whole(tmp_path) == iteration
        assert handle.drain(60)
        assert handle.status().durable == 3


def test_nothing_staged_is_nothing_to_drain(tmp_path: Path) -> None:
    with StoreHandle.open(tmp_path, SMALL, notify=silent) as handle:
        assert handle.drain(60)
        assert handle.persist_now() is None
    assert newest_whole(tmp_path) == 0


def test_an_abandoned_slot_is_no_checkpoint(tmp_path: Path) -> None:
    """What was not staged is never restored."""
    with StoreHandle.open(tmp_path, SMALL, notify=silent) as handle:
        assert stage(handle, SMALL, 1)
        for _ in range(4):
            slot = handle.acquire()
            assert slot is not None
            fill(slot.data, SMALL, 99)
            handle.abandon(slot)
    assert newest_whole(tmp_path) == 1


def test_marked_checkpoints_are_retained(tmp_path: Path) -> None:
    """persist_now(keep=True) retains this one for good, whatever the pace."""
    with StoreHandle.open(
        tmp_path, SMALL, notify=silent, persist_every=PersistEvery(iterations=1000), retention=Retention(last=1)
    ) as handle:
        for iteration in range(1, 7):
            assert stage(handle, SMALL, iteration)
            if iteration == 2:
                handle.persist_now(keep=True)
            handle.drain(60)
    kept = {
        found.iteration: found.manifest.keep for found in list_checkpoints(tmp_path) if isinstance(found, Checkpoint)
    }
    assert kept == {6: False, 2: True}


def test_block_persists_each_one_that_is_due(tmp_path: Path) -> None:
    """Nothing is given up: the trainer waits instead, and the wait is counted."""
    with StoreHandle.open(
        tmp_path, SMALL, slots=2, backpressure="block", notify=silent, persist_every=EACH, retention=Retention(last=99)
    ) as handle:
        for iteration in range(1, 13):
            assert stage(handle, SMALL, iteration)
        assert handle.status().blocked_ns > 0
    assert [found.iteration for found in list_checkpoints(tmp_path)] == list(range(12, 0, -1))
    assert handle.status().skipped == 0


@pytest.mark.parametrize("slots", [2, 3])
def test_skip_never_waits_and_the_newest_wins(tmp_path: Path, slots: int) -> None:
    """With a stopped saver, two slots skip and three never do; what is durable at last is the newest staged."""
    with StoreHandle.open(tmp_path, SMALL, slots=slots, notify=silent, persist_every=EACH) as handle:
        assert stage(handle, SMALL, 1)
        until(lambda: handle.shared.durable_sequence == 1, "the first is durable")
        with stopped(handle):
            for iteration in range(2, 30):
                assert stage(handle, SMALL, iteration)  # nothing is being persisted, so one slot is always free
        assert handle.status().skipped == 0
        assert handle.drain(60)
        assert newest_whole(tmp_path) == 29


def test_a_long_record_is_refused(tmp_path: Path) -> None:
    """One line that says the room; the slot can still be staged with a shorter one."""
    with StoreHandle.open(tmp_path, SMALL, notify=silent, record_room_bytes=5000) as handle:
        slot = handle.acquire()
        assert slot is not None
        fill(slot.data, SMALL, 1)
        with pytest.raises(StoreError, match=r"do not fit the slot's 8\.00 KiB"):
            handle.stage(slot, 1, b"x" * 8193)
        handle.stage(slot, 1, record_of(1))
        with pytest.raises(StoreError, match="is not being filled"):
            handle.stage(slot, 2, record_of(2))
    assert newest_whole(tmp_path) == 1


def test_too_many_slots_in_use_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with StoreHandle.open(tmp_path, SMALL, slots=2, backpressure="block", notify=silent) as handle:
        first, second = handle.acquire(), handle.acquire()
        assert first is not None and second is not None
        with pytest.raises(StoreError, match="all are being filled"):
            handle.acquire()


def test_a_dead_saver_is_started_again(tmp_path: Path) -> None:
    """A killed saver costs nothing: the next one persists what is due, and removes what it left."""
    with StoreHandle.open(tmp_path, SMALL, notify=silent, persist_every=PersistEvery(iterations=1000)) as handle:
        assert stage(handle, SMALL, 1)
        first = saver_of(handle)
        os.kill(first, signal.SIGKILL)
        until(lambda: gone(first), "killed")
        (tmp_path / ".incomplete-00000001-iteration-1-0-0").mkdir()
        (tmp_path / ".incomplete-00000001-iteration-1-0-0" / "model.safetensors").touch()
        handle.poll()
        assert saver_of(handle) != first
        assert handle.drain(60)
        assert newest_whole(tmp_path) == 1
        assert handle.status().restarts == 1
        assert not list(tmp_path.glob(".incomplete*"))


def test_a_saver_that_keeps_dying_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few deaths in a row training is told, and close does not hang."""
    handle = StoreHandle.open(tmp_path, SMALL, notify=silent)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    os.kill(saver_of(handle), signal.SIGKILL)

    def tend() -> bool:
        handle.poll()
        return False

    with pytest.raises(StoreError, match="died 4 times in a row"):
        until(tend, "deaths")
    assert stage(handle, SMALL, 1)
    with pytest.raises(StoreError, match="iteration 1 is lost: no saver runs"):
        handle.close()


def test_a_hanging_saver_is_an_error_by_policy(tmp_path: Path) -> None:
    """Told once, training goes on under "warn"; when it moves again, so does everything else."""
    told: list[str] = []
    with StoreHandle.open(
        tmp_path, SMALL, notify=told.append, on_error="warn", persist_every=EACH, hang_s=0.05
    ) as handle:
        with stopped(handle):

            def tend(iteration: int = 1) -> bool:
                stage(handle, SMALL, iteration)
                handle.poll()
                return bool(told)

            until(tend, "the hang is seen")
            assert "has not moved for 0.05 s" in told[0]
            tend(2)
            assert len(told) == 1
        until(lambda: handle.shared.durable_sequence > 0, "it moves again")
        handle.poll()
        assert handle.drain(60)


def test_a_hanging_saver_does_not_hang_the_end(tmp_path: Path) -> None:
    """Close gives up at its deadline, kills it, and says so."""
    handle = StoreHandle.open(tmp_path, SMALL, notify=silent)
    saver = saver_of(handle)
    assert stage(handle, SMALL, 1)
    os.kill(saver, signal.SIGSTOP)
    with pytest.raises(StoreError, match="not durable at the deadline"):
        handle.close(deadline_s=0.2)
    until(lambda: gone(saver), "killed")
    StoreLock.acquire(tmp_path, silent, timeout_s=60).close()


def test_block_with_a_hanging_saver_ends_too(tmp_path: Path) -> None:
    """Under "raise" the wait ends in the error."""
    handle = StoreHandle.open(
        tmp_path, SMALL, slots=2, backpressure="block", notify=silent, persist_every=EACH, hang_s=0.05
    )
    saver = saver_of(handle)
    os.kill(saver, signal.SIGSTOP)
    with pytest.raises(StoreError, match="has not moved"):
        for iteration in range(1, 5):
            stage(handle, SMALL, iteration)
    with pytest.raises(StoreError, match="was killed"):
        handle.close(deadline_s=0.2)


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_errors_of_the_saver_reach_the_trainer(tmp_path: Path, policy: str) -> None:
    """A store that is removed while running: one clear line, by policy, at the next poll."""
    store = tmp_path / "store"
    told: list[str] = []
    handle = StoreHandle.open(
        store, SMALL, notify=told.append, on_error="raise" if policy == "raise" else "warn", persist_every=EACH
    )
    assert stage(handle, SMALL, 1)
    until_verified(handle, 1)
    store.rename(tmp_path / "elsewhere")
    assert stage(handle, SMALL, 2)
    if policy == "raise":
        with pytest.raises(StoreError, match=r"iteration 2 cannot be made durable .*do not remove a store"):
            handle.drain(60)
        with pytest.raises(StoreError, match="iteration 2"):  # close tries again, and tells again
            handle.close()
    else:
        assert not handle.drain(60)
        assert stage(handle, SMALL, 3)
        (tmp_path / "elsewhere").rename(store)
        handle.close()
        assert "iteration 2 cannot be made durable" in told[0]
    assert newest_whole(store if policy == "warn" else tmp_path / "elsewhere") == (1 if policy == "raise" else 3)


def test_a_second_trainer_is_refused(tmp_path: Path) -> None:
    """In this process or another; the line names the first one's pid and host."""
    with StoreHandle.open(tmp_path, SMALL, notify=silent):
        with pytest.raises(StoreBusyError, match=f"another trainer, process {os.getpid()} on {os.uname().nodename}"):
            StoreHandle.open(tmp_path, SMALL, notify=silent)
        script = (
            "import pathlib\nfrom checkflow.store.lock import StoreLock\n"
            "from checkflow.errors import StoreBusyError\n"
            "try: StoreLock.acquire(pathlib.Path(sys.argv[1]), print)\n"
            "except StoreBusyError as error: sys.stdout.write(str(error))"
        )
        refused = subprocess.run(trainer_command(script, tmp_path), capture_output=True, text=True, check=True)
        assert f"process {os.getpid()}" in refused.stdout
    StoreHandle.open(tmp_path, SMALL, notify=silent).close()


def test_a_new_trainer_waits_for_the_old_saver_and_says_so(tmp_path: Path) -> None:
    """The dead trainer's newest checkpoint is on disk before the new one starts."""
    script = (
        "import pathlib, os, signal\nfrom small_store import *\n"
        "handle = StoreHandle.open(pathlib.Path(sys.argv[1]), SMALL, notify=print)\n"
        "os.kill(handle.saver_pid, signal.SIGSTOP)\n"
        "stage(handle, SMALL, 41)\n"
        "print(handle.saver_pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(trainer_command(script, tmp_path), capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    saver = int(killed.stdout)
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        os.kill(saver, signal.SIGCONT)

    StoreLock.acquire(tmp_path, tell).close()
    assert f"waiting for the previous run's saver, process {saver}" in told[0]
    assert newest_whole(tmp_path) == 41


def test_errors_after_the_trainers_death_are_told_to_the_next(tmp_path: Path) -> None:
    """Nobody heard them, so they wait in the store; the saver does not try for ever."""
    script = (
        "import pathlib, os, signal\nfrom small_store import *\n"
        "handle = StoreHandle.open(pathlib.Path(sys.argv[1]), SMALL, notify=print)\n"
        "os.kill(handle.saver_pid, signal.SIGSTOP)\n"
        "stage(handle, SMALL, 41)\n"
        "handle.shared._words[64 + 3] ^= 1\n"  # the record's hash no longer matches
        "print(handle.saver_pid, flush=True)\n"
        "os.kill(handle.saver_pid, signal.SIGCONT)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(trainer_command(script, tmp_path), capture_output=True, text=True, check=False)
    until(lambda: gone(int(killed.stdout)), "the saver ended")
    assert newest_whole(tmp_path) == 0
    told: list[str] = []
    StoreHandle.open(tmp_path, SMALL, notify=told.append).close()
    assert "could not tell" in told[0] and "is not what was staged" in told[0]
    assert not (tmp_path / LOG).exists()


def _child(pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_forked_worker_holds_nothing(tmp_path: Path) -> None:
    """A data-loader worker that outlives its trainer keeps neither the lock nor the saver's socket open."""
    handle = StoreHandle.open(tmp_path / "store", SMALL, notify=silent)
    worker = multiprocessing.get_context("fork").Process(target=_child, args=(str(tmp_path / "pid"),))
    worker.start()
    until(lambda: (tmp_path / "pid").exists(), "the worker runs")
    held = [os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd")]  # noqa: PTH115, PTH208
    assert not [path for path in held if path.endswith("/lock")]
    handle.close()
    StoreHandle.open(tmp_path / "store", SMALL, notify=silent).close()
    worker.kill()
    worker.join()


def test_the_saver_has_no_descriptor_but_its_own_and_no_torch(tmp_path: Path) -> None:
    """Memory, socket, lock, pidfd and the null device; its own session; torch is not in its address space."""
    with StoreHandle.open(tmp_path, SMALL, notify=silent) as handle, (tmp_path / "opened").open("w") as opened:
        os.set_inheritable(opened.fileno(), True)
        assert stage(handle, SMALL, 1)
        until_verified(handle, 1)
        saver = saver_of(handle)
        files = {os.readlink(f"/proc/{saver}/fd/{fd}") for fd in os.listdir(f"/proc/{saver}/fd")}  # noqa: PTH115, PTH208
        kinds = {path.split(":")[0] for path in files}
        assert kinds <= {"/dev/null", "/memfd", "socket", "anon_inode", "pidfd", str(tmp_path / "lock")} | {
            path for path in files if path.startswith("/memfd:")
        }
        assert os.getsid(saver) == saver
        assert "torch" not in Path(f"/proc/{saver}/maps").read_text()


def test_nothing_leaks_over_many_stores(tmp_path: Path) -> None:
    """Descriptors, threads, children and mappings are as before."""

    def resources() -> tuple[int, int, int, str]:
        maps = Path("/proc/self/maps").read_text().count("checkflow-slots")
        tasks = list(Path("/proc/self/task").iterdir())
        children = "".join((task / "children").read_text() for task in tasks)
        return len(list(Path("/proc/self/fd").iterdir())), len(tasks), maps, children

    StoreHandle.open(tmp_path / "0", SMALL, notify=silent).close()
    before = resources()
    for number in range(1, 6):
        with StoreHandle.open(tmp_path / str(number), SMALL, notify=silent) as handle:
            assert stage(handle, SMALL, 1)
    assert resources() == before


def test_ten_thousand_iterations_are_flat(tmp_path: Path) -> None:
    """Descriptors, threads and memory of trainer and saver, after 10,000 staged checkpoints."""

    def resources(saver: int) -> tuple[int, ...]:
        both = (os.getpid(), saver)
        return tuple(len(list(Path(f"/proc/{pid}/{what}").iterdir())) for pid in both for what in ("fd", "task"))

    def private_kib(pid: int) -> int:
        return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0])

    with StoreHandle.open(tmp_path, SMALL, notify=silent, persist_every=PersistEvery(iterations=500)) as handle:
        saver = saver_of(handle)
        for iteration in range(1, 10_001):
            assert stage(handle, SMALL, iteration)
            handle.poll()
            if iteration == 2000:
                until_idle(handle)
                before, memory = resources(saver), (private_kib(os.getpid()), private_kib(saver))
        until_idle(handle)
        assert resources(saver) == before
        assert private_kib(os.getpid()) - memory[0] < 4096
        assert private_kib(saver) - memory[1] < 4096
        assert handle.status().staged == 10_000


def test_too_little_memory_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated; the store is free again."""
    from checkflow.store.memory import Allowance

    monkeypatch.setattr("checkflow.store.shared.allowance", lambda: Allowance(1000, "the machine's available memory"))
    with pytest.raises(StoreError, match=r"3 slots of 32\.0 KiB need .* available memory leaves 1000 B; use slots=2"):
        StoreHandle.open(tmp_path, SMALL, notify=silent)
    monkeypatch.undo()
    StoreHandle.open(tmp_path, SMALL, notify=silent).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        StoreHandle.open(tmp_path / "store", SMALL, notify=silent)


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be"):
        StoreHandle.open(tmp_path / "file" / "store", SMALL, notify=silent)


@pytest.mark.parametrize(
    ("every", "iterations", "due"),
    [
        (PersistEvery(iterations=1), [1, 2, 3], [1, 2, 3]),
        (PersistEvery(iterations=3), [1, 2, 3, 4, 5, 6, 7], [3, 6]),
        (PersistEvery(iterations=3), [2, 4, 8, 11], [4, 8, 11]),
        (PersistEvery(iterations=100), [250, 299, 301], [301]),
    ],
)
def test_pace_in_iterations(every: PersistEvery, iterations: list[int], due: list[int]) -> None:
    """At each multiple, or at the first staged iteration after it."""
    pace = Pace(every)
    assert [iteration for iteration in iterations if pace.due(iteration, 0.0, 0.0)] == due


def test_pace_in_seconds() -> None:
    """The first at once; then by the clock, and by default at most a tenth of the time, within bounds."""
    pace = Pace(PersistEvery(seconds=2))
    assert [now for now in range(8) if pace.due(now, float(now), 0.0)] == [0, 2, 4, 6]
    pace = Pace(PersistEvery())
    assert [now for now in range(100) if pace.due(now, float(now), 1.0)] == [0, 30, 60, 90]
    pace = Pace(PersistEvery())
    assert [now for now in range(500) if pace.due(now, float(now), 20.0)] == [0, 200, 400]
    pace = Pace(PersistEvery())
    assert [now for now in range(2000) if pace.due(now, float(now), 300.0)] == [0, 600, 1200, 1800]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PersistEvery(iterations=0),
        lambda: PersistEvery(seconds=-1),
        lambda: PersistEvery(seconds=float("nan")),
        lambda: PersistEvery(iterations=1, seconds=1),
        lambda: Retention(last=0),
        lambda: Retention(every=0),
    ],
)
def test_wrong_settings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        wrong()
