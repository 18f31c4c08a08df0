"""A trainer's handle with a real saver process: what is staged, durable, verified, and what is said when it is not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import refusing, runs
from small_store import (
    SMALL,
    fill,
    newest_whole,
    record_of,
    saver_of,
    silent,
    stage,
    stop,
    stopped,
    until,
    until_idle,
    until_verified,
)

from checkflow.errors import StoreError
from checkflow.store.both.lock import StoreLock
from checkflow.store.format.reader import Checkpoint, list_checkpoints, load_newest
from checkflow.store.format.regular_file import read_at
from checkflow.store.format.retention import Retention
from checkflow.store.memory.allowance import Allowance
from checkflow.store.memory.record_overflow import Overflow
from checkflow.store.saver.loop import LOOK_MS
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.store.trainer.saver_process import SaverProcess

EACH = PersistEvery(iterations=1)


def test_a_run_and_what_it_leaves(tmp_path: Path) -> None:
    """Staged, durable and verified are counted apart; after close the newest is on disk and the saver is gone."""
    store = tmp_path / "deep" / "store"
    with StoreHandle.open(store, [SMALL], notify=silent) as handle:
        saver = saver_of(handle)
        for iteration in range(1, 6):
            assert stage(handle, SMALL, iteration)
            handle.poll()
        assert handle.status().staged_iteration == 5
    status = handle.status()
    assert (status.staged, status.durable_iteration, status.verified_iteration, status.lag_iterations) == (5, 5, 5, 0)
    assert status.written_bytes > 0 and status.write_bytes_per_s > 0
    assert not runs(saver)
    assert newest_whole(store) == 5
    assert sorted(path.name for path in store.iterdir() if "iteration" not in path.name) == ["lock"]
    handle.close()  # again is nothing


def test_drain_is_durable(tmp_path: Path) -> None:
    """After drain the newest staged checkpoint is restored, while the handle is open."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=PersistEvery(iterations=1000)) as handle:
        for iteration in (1, 2, 3):
            assert stage(handle, SMALL, iteration)
            assert handle.drain(60)
            assert newest_whole(tmp_path) == iteration
        until_idle(handle, 3)
        assert handle.status().durable == 3


def test_what_drain_made_durable_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver's report comes after what it reports, on a busy machine noticeably."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=PersistEvery(iterations=1000)) as handle:
        tend, seen, sequence = handle._saver.tend, list[float](), 0

        def late() -> None:
            if handle.shared.durable_sequence >= sequence:
                seen.append(time.monotonic())
            if not seen or time.monotonic() > seen[0] + 0.05:
                tend()

        for iteration in (1, 2, 3):
            assert stage(handle, SMALL, iteration)
            sequence = handle.persist_now() or 0
            seen.clear()
            with monkeypatch.context() as patch:
                patch.setattr(handle._saver, "tend", late)
                assert handle.drain(60)
            assert (handle.status().durable, handle.status().durable_iteration) == (iteration, iteration)


def test_nothing_staged_is_nothing_to_drain(tmp_path: Path) -> None:
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
        assert handle.drain(60)
        assert handle.persist_now() is None
    assert newest_whole(tmp_path) == 0


def test_an_abandoned_slot_is_no_checkpoint(tmp_path: Path) -> None:
    """What was not staged is never restored."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
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
        tmp_path, [SMALL], notify=silent, persist_every=PersistEvery(iterations=1000), retention=Retention(last=1)
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
        tmp_path, [SMALL], slots=2, when_full="wait", notify=silent, persist_every=EACH, retention=Retention(last=99)
    ) as handle:
        for iteration in range(1, 13):
            assert stage(handle, SMALL, iteration)
        assert handle.status().blocked_ns > 0
    assert [found.iteration for found in list_checkpoints(tmp_path)] == list(range(12, 0, -1))
    assert handle.status().skipped == 0


@pytest.mark.parametrize("slots", [2, 3])
def test_skip_never_waits_and_the_newest_wins(tmp_path: Path, slots: int) -> None:
    """With a saver that does nothing there is always a slot; what is durable at last is the newest staged."""
    with StoreHandle.open(tmp_path, [SMALL], slots=slots, notify=silent, persist_every=EACH) as handle:
        assert stage(handle, SMALL, 1)
        until_verified(handle, 1)  # not stopped in the middle of a change
        with stopped(handle):
            for iteration in range(2, 30):
                assert stage(handle, SMALL, iteration)  # nothing is being persisted, so one slot is always free
        assert handle.status().skipped == 0
        assert handle.drain(60)
        assert newest_whole(tmp_path) == 29


def test_a_single_slot_waits_until_its_checkpoint_is_durable(tmp_path: Path) -> None:
    """Under `skip` it has none to give until then; under `wait` the trainer waits. Each is persisted."""
    with StoreHandle.open(tmp_path, [SMALL], slots=1, notify=silent) as handle:
        assert stage(handle, SMALL, 1)
        until_verified(handle, 1)
        with stopped(handle):
            assert stage(handle, SMALL, 2)
            assert handle.acquire() is None
        assert handle.drain(60) and handle.status().skipped == 1
        assert handle.acquire() is not None
        assert handle.persist_now(keep=True) is None  # what is on disk no slot has any more
        assert handle.drain(60)


def test_a_single_slot_wakes_its_saver_each_time(tmp_path: Path) -> None:
    """Also one that has nothing left to settle and sleeps, and whatever persist_every says."""
    never = PersistEvery(iterations=1000)
    with StoreHandle.open(
        tmp_path, [SMALL], slots=1, when_full="wait", notify=silent, persist_every=never, hang_s=5.0
    ) as handle:
        for iteration in range(1, 4):
            assert stage(handle, SMALL, iteration)
            until_verified(handle, iteration)
            time.sleep(10 * LOOK_MS / 1000)  # until it looks no more by itself
    assert newest_whole(tmp_path) == 3


def test_a_signal_handler_may_wait_for_the_saver_while_the_program_does(tmp_path: Path) -> None:
    """As SIGTERM does that arrives in `save`."""
    heard: list[bool] = []
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
        assert stage(handle, SMALL, 1)
        until_verified(handle, 1)
        before = signal.signal(signal.SIGALRM, lambda *_: heard.append(handle.drain(60)))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        handle._saver.wait(0.3)
        signal.signal(signal.SIGALRM, before)
    assert heard == [True]


def test_a_single_slot_is_filled_again_where_the_disk_fails(tmp_path: Path) -> None:
    """What could not be made durable in time is told, and does not hold up what comes after it."""
    told: list[str] = []
    with StoreHandle.open(
        tmp_path, [SMALL], slots=1, when_full="wait", on_error="warn", notify=told.append, retry_s=0
    ) as handle:
        assert stage(handle, SMALL, 1) and handle.drain(60)
        until_verified(handle, 1)
        with refusing(saver_of(handle)):
            assert stage(handle, SMALL, 2) and not handle.drain(60)
            slot = handle.acquire()
            assert slot is not None and not handle.drain(60)
        fill(slot.data, SMALL, 3)
        handle.stage(slot, 3, record_of(3))
        assert handle.drain(60)
    assert newest_whole(tmp_path) == 3
    failures, last = told[:-1], told[-1]
    assert failures and all(
        "iteration 2 cannot be made durable" in line for line in failures
    )  # a drain tries once more
    assert "made durable again" in last


def test_a_drain_waits_for_its_own_attempt(tmp_path: Path) -> None:
    """An earlier attempt's failure, heard while it is tried again, is told, and is not the drain's answer."""
    told: list[str] = []
    with StoreHandle.open(
        tmp_path, [SMALL], persist_every=EACH, on_error="warn", notify=told.append, retry_s=0
    ) as handle:
        assert stage(handle, SMALL, 1) and handle.drain(60)
        until_verified(handle, 1)
        with refusing(saver_of(handle)):
            assert stage(handle, SMALL, 2)
            until(lambda: not handle.pending, "it was tried")
        assert handle.drain(60)
    assert newest_whole(tmp_path) == 2
    assert "iteration 2 cannot be made durable" in told[0]
    assert "made durable again" in told[1] and len(told) == 2


def restarted(handle: StoreHandle) -> bool:
    handle.poll()
    return handle.status().restarts == 1


def test_a_record_that_outgrows_its_room_gets_more(tmp_path: Path) -> None:
    """Each iteration's is longer, then short again; a saver that starts after it has grown finds it, too."""
    sizes = [5000, 9000, 9000, 40_000, 3_000_000, 20_000_000, 20_000_001, 17, 8192, 8193]
    open_room = StoreHandle.open(
        tmp_path, [SMALL], notify=silent, record_room_bytes=5000, persist_every=PersistEvery(seconds=10**6)
    )
    with open_room as handle:
        for iteration, size in enumerate(sizes, start=1):
            slot = handle.acquire()
            assert slot is not None
            fill(slot.data, SMALL, iteration)
            record = bytes([32 + iteration]) * size
            handle.stage(slot, iteration, record)
            if iteration == 6:
                os.kill(saver_of(handle), signal.SIGKILL)
                until(lambda: restarted(handle), "there is a new saver")
            if iteration > 4:
                assert handle.persist_now() is not None
                assert handle.drain(60)
                loaded = load_newest(tmp_path).loaded
                assert loaded is not None and loaded.checkpoint.iteration == iteration
                assert loaded.record == record


def test_what_a_record_has_outgrown_is_given_back() -> None:
    """The file's end moves on, its memory does not add up."""
    fd = os.memfd_create("overflow")
    overflow = Overflow(fd, lambda: contextlib.nullcontext(True))
    for size in range(2**20, 20 * 2**20, 2**19):
        at = overflow.put(0, b"r" * size)
        assert read_at(fd, at, size) == b"r" * size
    assert at == overflow.put(0, b"short")  # what there is is used again
    information = os.fstat(fd)
    assert information.st_blocks * 512 < 30 * 2**20 < information.st_size
    os.close(fd)


def test_a_record_that_cannot_be_kept_leaves_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; the slot can still be staged with a shorter one."""
    monkeypatch.setattr("checkflow.store.memory.shared_memory.MAX_RECORD_BYTES", 10_000)
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, record_room_bytes=5000) as handle:
        slot = handle.acquire()
        assert slot is not None
        fill(slot.data, SMALL, 1)
        with pytest.raises(StoreError, match=r"commit record: 9\.77 KiB are more than .* put less into metadata="):
            handle.stage(slot, 1, b"x" * 10_001)
        monkeypatch.setattr("checkflow.store.memory.record_overflow.allowance", lambda: Allowance(5, "a limit"))
        with pytest.raises(StoreError, match=r"needs 12\.0 KiB of memory, but a limit leaves 5 B"):
            handle.stage(slot, 1, b"x" * 9000)
        handle.stage(slot, 1, record_of(1))
        with pytest.raises(StoreError, match="is not being filled"):
            handle.stage(slot, 2, record_of(2))
    assert newest_whole(tmp_path) == 1


def test_too_many_slots_in_use_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with StoreHandle.open(tmp_path, [SMALL], slots=2, when_full="wait", notify=silent) as handle:
        first, second = handle.acquire(), handle.acquire()
        assert first is not None and second is not None
        with pytest.raises(StoreError, match="all are being filled"):
            handle.acquire()


def test_a_slot_may_become_free_while_one_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is pending any more when the look for a slot has failed: one looks again."""
    with StoreHandle.open(tmp_path, [SMALL], slots=3, when_full="wait", notify=silent, persist_every=EACH) as handle:
        saver = stop(handle)
        assert stage(handle, SMALL, 1) and stage(handle, SMALL, 2)
        filling = handle.acquire()
        assert filling is not None
        look = handle._slots.try_acquire

        def too_early(_lane: int) -> None:
            os.kill(saver, signal.SIGCONT)
            until_idle(handle, 2)
            monkeypatch.setattr(handle._slots, "try_acquire", look)

        monkeypatch.setattr(handle._slots, "try_acquire", too_early)
        second = handle.acquire()
        assert second is not None
        handle.abandon(filling)
        handle.abandon(second)


def test_a_dead_saver_is_started_again(tmp_path: Path) -> None:
    """A killed saver costs nothing: the next one persists what is due, and removes what it left."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=PersistEvery(iterations=1000)) as handle:
        assert stage(handle, SMALL, 1)
        first = saver_of(handle)
        (tmp_path / ".incomplete-00000001-iteration-1-0-0").mkdir()
        (tmp_path / ".incomplete-00000001-iteration-1-0-0" / "model.safetensors").touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: handle.saver_pid not in (None, first), "another one runs, with no poll")
        assert handle.drain(60)
        assert newest_whole(tmp_path) == 1
        assert handle.status().restarts == 1
        assert not list(tmp_path.glob(".incomplete*"))


def test_a_saver_that_keeps_dying_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few deaths in a row and the time to try again training is told, and close does not hang."""
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent, retry_s=0)
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
        tmp_path, [SMALL], notify=told.append, on_error="warn", persist_every=EACH, hang_s=0.05
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
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent)
    saver = stop(handle)
    assert stage(handle, SMALL, 1)
    with pytest.raises(StoreError, match="not durable at the deadline"):
        handle.close(deadline_s=0.2)
    until(lambda: not runs(saver), "killed")
    StoreLock.acquire(tmp_path, silent, timeout_s=60).close()


def test_the_end_of_a_saver_is_waited_for_and_not_asked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has closed its socket a while before it is gone: the core is its own meanwhile."""
    program = tmp_path / "python"
    listen = "import os, sys, time\nwhile os.read(int(sys.argv[5]), 64) != b'close':\n    pass\n"
    program.write_text(f"#!{sys.executable} -IS\n{listen}os.close(int(sys.argv[5]))\ntime.sleep(1)\n")
    program.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(program))
        handle = StoreHandle.open(tmp_path / "store", [SMALL], notify=silent)
    waits = 0
    stirs = SaverProcess.stirs

    def counted(self: SaverProcess, timeout_s: float) -> bool:
        nonlocal waits
        waits += 1
        return stirs(self, timeout_s)

    monkeypatch.setattr(SaverProcess, "stirs", counted)
    handle.close()
    assert 0 < waits < 50  # each of a tenth of a second


def test_block_with_a_hanging_saver_ends_too(tmp_path: Path) -> None:
    """Under "raise" the wait ends in the error."""
    handle = StoreHandle.open(
        tmp_path, [SMALL], slots=2, when_full="wait", notify=silent, persist_every=EACH, hang_s=0.05
    )
    stop(handle)
    with pytest.raises(StoreError, match="has not moved"):
        for iteration in range(1, 5):
            stage(handle, SMALL, iteration)
    with pytest.raises(StoreError, match="was killed"):
        handle.close(deadline_s=0.2)


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_errors_of_the_saver_reach_the_trainer(tmp_path: Path, policy: str) -> None:
    """What is not tried again any more: one clear line, by policy, at the next poll."""
    told: list[str] = []
    handle = StoreHandle.open(
        tmp_path, [SMALL], notify=told.append, on_error="raise" if policy == "raise" else "warn", persist_every=EACH,
        retry_s=0,
    )  # fmt: skip
    assert stage(handle, SMALL, 1)
    until_verified(handle, 1)
    with refusing(saver_of(handle)):
        assert stage(handle, SMALL, 2)
        if policy == "raise":
            with pytest.raises(StoreError, match=r"iteration 2 cannot be made durable \(File too large"):
                handle.drain(60)
            with pytest.raises(StoreError, match="iteration 2"):  # close tries again, and tells again
                handle.close()
        else:
            assert not handle.drain(60)
            assert stage(handle, SMALL, 3)
    if policy == "warn":
        handle.close()
        assert "iteration 2 cannot be made durable" in told[0]
    assert newest_whole(tmp_path) == (1 if policy == "raise" else 3)


def test_a_removed_store_is_an_error_at_once(tmp_path: Path) -> None:
    """It takes nothing ever again, and nobody makes another one behind the user's back."""
    store = tmp_path / "store"
    handle = StoreHandle.open(store, [SMALL], notify=silent, persist_every=EACH)
    assert stage(handle, SMALL, 1)
    until_verified(handle, 1)
    shutil.rmtree(store)
    assert stage(handle, SMALL, 2)
    with pytest.raises(
        StoreError, match=r"iteration 2 cannot be made durable .*do not remove a store .* is gone, too$"
    ):
        handle.drain(60)
    with pytest.raises(StoreError, match="iteration 2"):
        handle.close()
    assert not store.exists()


def test_too_little_memory_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated; the store is free again."""
    from checkflow.store.memory.allowance import Allowance

    monkeypatch.setattr(
        "checkflow.store.memory.room.allowance", lambda: Allowance(1000, "the machine's available memory")
    )
    with pytest.raises(StoreError, match=r"3 slots of 32\.0 KiB need .* available memory leaves 1000 B; use slots=2"):
        StoreHandle.open(tmp_path, [SMALL], notify=silent)
    monkeypatch.undo()
    StoreHandle.open(tmp_path, [SMALL], notify=silent).close()


def test_a_store_that_cannot_be_written_is_refused_at_once() -> None:
    """In /proc, where root cannot make a directory either."""
    with pytest.raises(StoreError, match="cannot be"):
        StoreHandle.open(Path("/proc/checkflow-store"), [SMALL], notify=silent)


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be"):
        StoreHandle.open(tmp_path / "file" / "store", [SMALL], notify=silent)


def test_once_it_is_closed_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    """A signal may ask for it late in the end."""
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent)
    assert stage(handle, SMALL, 1)
    handle.close()
    assert handle.drain(0.0)
