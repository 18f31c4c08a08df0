"""Who else is there: second trainers, former savers, forked workers; and what is left of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import children, descriptors, runs
from small_store import (
    SMALL,
    newest_whole,
    saver_of,
    silent,
    stage,
    trainer_command,
    until,
    until_idle,
    until_verified,
)

from checkflow.background import NICENESS, environment
from checkflow.errors import StoreBusyError, StoreError
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.saver_log import LOG
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.lingering import Lingering
from checkflow.store.trainer.persist_every import PersistEvery


def test_a_second_trainer_is_refused(tmp_path: Path) -> None:
    """In this process or another; the line names the first one's pid and host."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent):
        with pytest.raises(StoreBusyError, match=f"another trainer, process {os.getpid()} on {os.uname().nodename}"):
            StoreHandle.open(tmp_path, [SMALL], notify=silent)
        script = (
            "import pathlib\nfrom checkflow.store.both.lock import StoreLock\n"
            "from checkflow.errors import StoreBusyError\n"
            "try: StoreLock.acquire(pathlib.Path(sys.argv[1]), print)\n"
            "except StoreBusyError as error: sys.stdout.write(str(error))"
        )
        refused = subprocess.run(trainer_command(script, tmp_path), capture_output=True, text=True, check=True)
        assert f"process {os.getpid()}" in refused.stdout
    StoreHandle.open(tmp_path, [SMALL], notify=silent).close()


def test_a_signal_to_everybody_finds_no_saver_that_could_hear_it(tmp_path: Path) -> None:
    """Not even one that has only just been started: it is the one that has what is staged."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
            saver = saver_of(handle)
            os.kill(saver, number)
            stage(handle, SMALL, 1)
            until_verified(handle, 1)
            assert saver_of(handle) == saver


def test_the_saver_gives_way_to_the_training(tmp_path: Path) -> None:
    """By its own niceness and its session's: where sessions are scheduling groups, only the group's counts."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
        stage(handle, SMALL, 1)
        until_verified(handle, 1)  # it runs
        saver = saver_of(handle)
        assert os.getpriority(os.PRIO_PROCESS, saver) == min(19, os.nice(0) + NICENESS)
        group = Path(f"/proc/{saver}/autogroup")
        if group.exists():
            assert group.read_text().split()[-1] == str(NICENESS)


def test_a_new_trainer_waits_for_the_old_saver_and_says_so(tmp_path: Path) -> None:
    """The dead trainer's newest checkpoint is on disk before the new one starts."""
    script = (
        "import pathlib, os, signal\nfrom small_store import *\n"
        "handle = StoreHandle.open(pathlib.Path(sys.argv[1]), [SMALL], notify=print)\n"
        "stop(handle)\n"
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
        "handle = StoreHandle.open(pathlib.Path(sys.argv[1]), [SMALL], notify=print)\n"
        "stop(handle)\n"
        "stage(handle, SMALL, 41)\n"
        "handle.shared._words[64 + 3] ^= 1\n"  # the record's hash no longer matches
        "print(handle.saver_pid, flush=True)\n"
        "os.kill(handle.saver_pid, signal.SIGCONT)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(trainer_command(script, tmp_path), capture_output=True, text=True, check=False)
    until(lambda: not runs(int(killed.stdout)), "the saver ended")
    assert newest_whole(tmp_path) == 0
    told: list[str] = []
    StoreHandle.open(tmp_path, [SMALL], notify=told.append).close()
    assert "could not tell" in told[0] and "is not what was staged" in told[0]
    assert not (tmp_path / LOG).exists()


def _child(pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_forked_worker_holds_nothing(tmp_path: Path) -> None:
    """A data-loader worker that outlives its trainer keeps neither the lock nor the saver's socket open."""
    handle = StoreHandle.open(tmp_path / "store", [SMALL], notify=silent)
    worker = multiprocessing.get_context("fork").Process(target=_child, args=(str(tmp_path / "pid"),))
    worker.start()
    until(lambda: (tmp_path / "pid").exists(), "the worker runs")
    assert worker.pid is not None
    held = descriptors(worker.pid)
    assert not [path for path in held if path.endswith("/lock")]
    handle.close()
    StoreHandle.open(tmp_path / "store", [SMALL], notify=silent).close()
    worker.kill()
    worker.join()


def test_the_saver_loads_no_plugins_of_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for pydantic that cannot be imported, or is torch's size, is nothing to it."""
    plugin = tmp_path / "plugin.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[pydantic]\nplugin = plugin:made\n")
    (tmp_path / "plugin.py").write_text("import os; os._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with StoreHandle.open(
        tmp_path / "store", [SMALL], notify=silent, persist_every=PersistEvery(iterations=1)
    ) as handle:
        assert stage(handle, SMALL, 1) and handle.drain(60)
        assert not handle.status().restarts


@pytest.mark.parametrize("name", ["PYTHONVERBOSE", "PYTHONPROFILEIMPORTTIME"])
def test_a_trainer_that_is_looked_into_has_a_saver(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python would say of the saver's imports has no room where its last words go."""
    monkeypatch.setenv(name, "1")
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=PersistEvery(iterations=1)) as handle:
        assert stage(handle, SMALL, 1) and handle.drain(60)
        assert not handle.status().restarts


def test_nothing_beside_the_trainer_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's variables for that make it many times slower."""
    names = ("PYTHONTRACEMALLOC", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG", "PYTHONMALLOC", "PYTHONVERBOSE")
    for name in names:
        monkeypatch.setenv(name, "debug" if name == "PYTHONMALLOC" else "1")
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
        given = Path(f"/proc/{saver_of(handle)}/environ").read_text()
    assert "PYTHONPATH=" in given
    assert not [name for name in names if name in given or name in environment()]


def test_the_saver_has_no_descriptor_but_its_own_and_no_torch(tmp_path: Path) -> None:
    """Memory, socket, lock, pidfd and the null device; its own session; torch is not in its address space."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle, (tmp_path / "opened").open("w") as opened:
        os.set_inheritable(opened.fileno(), True)
        assert stage(handle, SMALL, 1)
        until_verified(handle, 1)
        saver = saver_of(handle)
        own = {"/dev/null", "/memfd", "socket", "anon_inode", "pidfd", str(tmp_path), str(tmp_path / "lock")}
        until(
            lambda: {path.partition(":")[0] for path in descriptors(saver)} <= own,
            f"what it read back is closed, and only its own left of {descriptors(saver)}",
        )
        assert os.getsid(saver) == saver
        assert "torch" not in Path(f"/proc/{saver}/maps").read_text()


def test_nothing_leaks_over_many_stores(tmp_path: Path) -> None:
    """Descriptors, threads, children and mappings are no more than before."""

    def resources() -> tuple[tuple[int, ...], set[int]]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("checkflow-slots")
        opened, tasks = (len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))
        return (opened, tasks, maps), children()

    StoreHandle.open(tmp_path / "0", [SMALL], notify=silent).close()
    before, processes = resources()  # of tests before this one some may still end
    for number in range(1, 6):
        with StoreHandle.open(tmp_path / str(number), [SMALL], notify=silent) as handle:
            assert stage(handle, SMALL, 1)
    after, left = resources()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    assert left <= processes


def test_ten_thousand_iterations_are_flat(tmp_path: Path) -> None:
    """Descriptors, threads and memory of trainer and saver, after 10,000 staged checkpoints."""

    gc.collect()  # what tests before this one left is not closed meanwhile

    def resources(saver: int) -> tuple[int, ...]:
        both = (os.getpid(), saver)
        return tuple(len(list(Path(f"/proc/{pid}/{what}").iterdir())) for pid in both for what in ("fd", "task"))

    def settled(saver: int) -> tuple[int, ...]:
        """Once the saver has closed what it read back: the same count ten times in a row."""
        counts: list[tuple[int, ...]] = []
        while len(counts) < 10 or len(set(counts[-10:])) > 1:
            counts.append(resources(saver))
            time.sleep(0.02)
        return counts[-1]

    def private_kib(pid: int) -> int:
        return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0])

    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=PersistEvery(iterations=500)) as handle:
        saver = saver_of(handle)
        for iteration in range(1, 10_001):
            assert stage(handle, SMALL, iteration)
            handle.poll()
            if iteration == 2000:
                until_idle(handle, iteration)
                before, memory = settled(saver), (private_kib(os.getpid()), private_kib(saver))
        until_idle(handle, 10_000)
        assert settled(saver) == before
        assert private_kib(os.getpid()) - memory[0] < 4096
        assert private_kib(saver) - memory[1] < 4096
        assert handle.status().staged == 10_000


def test_what_a_saver_tells_as_it_ends_reaches_who_goes_on_with_other_slots(tmp_path: Path) -> None:
    """The next handle on the store delivers it: nobody asks the one before any more."""
    first = StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=PersistEvery(iterations=1))
    assert stage(first, SMALL, 1)
    until_idle(first, 1)
    end = first._saver.end

    def ends(deadline: float, lingering: Lingering) -> None:
        end(deadline, lingering)
        first._saver.fail("the checkpoint of iteration 1 is not what was written")

    first._saver.end = ends  # type: ignore[method-assign]
    with StoreHandle.open(tmp_path, [SMALL], after=first, notify=silent) as second:
        with pytest.raises(StoreError, match="iteration 1 is not what was written"):
            second.poll()
        assert second.status().errors == 1
