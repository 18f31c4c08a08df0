"""What a training does to its checkpoints besides training: starting over, rolling back, forking, being terminated."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import HANGS_S, Program
from safetensors.torch import load_file
from test_attach import attached, compiled, same, small, train, train_more, weights
from torch.utils.data import DataLoader, TensorDataset

import checkflow
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.schedule import Schedule, write_schedule
from checkflow.store.format.reader import Checkpoint, list_checkpoints
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.persist_every import PersistEvery


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return compiled(small)


def iterations(store: Path) -> list[int]:
    """Newest first."""
    return [found.iteration for found in list_checkpoints(store)]


# Starting over


def test_a_forgotten_restore_is_refused_and_costs_nothing(schedule: Schedule, tmp_path: Path) -> None:
    """By the first step() and by save(); after restore() both are as ever."""
    training = small()
    with attached(training, schedule, tmp_path) as ckpt:
        train(training, ckpt, 3)
    before = list_checkpoints(tmp_path)
    training = small()
    forgotten = r"holds checkpoints of iterations 3, 2, and nothing was restored; call restore\(\) .*start_over=True"
    with attached(training, schedule, tmp_path) as ckpt:
        training.iteration()
        with pytest.raises(InputError, match=f"step: .*{forgotten}"):
            ckpt.step()
        with pytest.raises(InputError, match=f"save: .*{forgotten}"):
            ckpt.save()
    assert list_checkpoints(tmp_path) == before
    with attached(training, schedule, tmp_path) as ckpt:
        assert ckpt.restore() == 3
        train_more(training, ckpt, 2)
    assert iterations(tmp_path)[0] == 5


def test_starting_over_keeps_the_old_runs_newest_for_good(schedule: Schedule, tmp_path: Path) -> None:
    """Also in the runs that resume the new one."""
    training = small()
    with attached(training, schedule, tmp_path) as ckpt:
        train(training, ckpt, 4)
    old = weights(training)
    training = small()
    with attached(training, schedule, tmp_path, start_over=True) as ckpt:
        assert ckpt.restore() == 0
        train_more(training, ckpt, 3)
        ckpt.save(keep=False)
        assert ckpt.restore() == 3  # its own
    training = small()
    with attached(training, schedule, tmp_path) as ckpt:
        train(training, ckpt, 7)
    assert iterations(tmp_path) == [7, 6, 4]
    kept = list_checkpoints(tmp_path)[-1]
    assert isinstance(kept, Checkpoint) and kept.kept
    assert same(load_file(kept.path / "model.safetensors"), old)


def test_starting_over_keeps_what_verifies(schedule: Schedule, tmp_path: Path) -> None:
    """And where nothing does, it says so and starts."""
    training = small()
    with attached(training, schedule, tmp_path) as ckpt:
        train(training, ckpt, 4)
    _corrupt(list_checkpoints(tmp_path)[0].path)
    with attached(small(), schedule, tmp_path, start_over=True):
        pass
    assert [found.kept for found in list_checkpoints(tmp_path) if isinstance(found, Checkpoint)] == [False, True]
    _corrupt(list_checkpoints(tmp_path)[1].path)
    with pytest.raises(CorruptStoreError), attached(small(), schedule, tmp_path) as ckpt:
        ckpt.restore()
    training, told = small(), list[str]()
    with attached(training, schedule, tmp_path, start_over=True, notify=told.append) as ckpt:
        train(training, ckpt, 1)
    assert any("nothing of what it holds is kept" in line for line in told)
    assert iterations(tmp_path)[0] == 1


def _corrupt(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")


# Rolling back


def test_a_rollback_tears_nothing_and_later_checkpoints_are_its_own(schedule: Schedule, tmp_path: Path) -> None:
    """Each checkpoint holds what its training was then; the newest is of the run that was rolled back."""
    expected: dict[int, dict[str, torch.Tensor]] = {}  # by serial
    training = small()
    with attached(training, schedule, tmp_path, retention=Retention(last=99)) as ckpt:
        for _ in range(5):
            train_more(training, ckpt, 1)
            expected[len(expected) + 1] = weights(training)
        ckpt.save(keep=False)
        assert ckpt.restore(2) == 2
        assert same(weights(training), expected[2])
        for _ in range(2):
            train_more(training, ckpt, 1)
            expected[len(expected) + 1] = weights(training)
    assert iterations(tmp_path) == [4, 3, 5, 4, 3, 2, 1]
    for found in list_checkpoints(tmp_path):
        assert same(load_file(found.path / "model.safetensors"), expected[found.serial]), found.path.name
    training = small()
    with attached(training, schedule, tmp_path) as ckpt:
        assert ckpt.restore() == 4
        assert same(weights(training), expected[7])


def test_restoring_in_the_middle_of_a_run_brings_its_last_staged_state_back(schedule: Schedule, tmp_path: Path) -> None:
    """Though the disk has an older one, and nothing yet."""
    training = small()
    with attached(training, schedule, tmp_path, persist_every=PersistEvery(seconds=600)) as ckpt:
        train(training, ckpt, 7)
        before = weights(training)
        training.iteration()
        assert ckpt.restore() == 7
        assert same(weights(training), before)


def test_without_a_checkpoint_a_run_in_progress_cannot_be_restored(tmp_path: Path) -> None:
    """0 would say that its state is the initial one."""
    training = small()
    with attached(training, compiled(small, interval=9), tmp_path) as ckpt:
        assert ckpt.restore() == 0
        train_more(training, ckpt, 2)
        with pytest.raises(InputError, match=r"restore: .* has no checkpoint yet"):
            ckpt.restore()


def test_after_a_rollback_every_nth_is_persisted_as_before(schedule: Schedule, tmp_path: Path) -> None:
    """Though iterations are counted from less."""
    training = small()
    with attached(
        training, schedule, tmp_path, persist_every=PersistEvery(iterations=4), retention=Retention(last=99)
    ) as ckpt:
        train(training, ckpt, 3)
        ckpt.save(keep=False)
        train_more(training, ckpt, 6)
        assert ckpt.restore(3) == 3
        train_more(training, ckpt, 3)
        ckpt.save(keep=False)
        assert iterations(tmp_path)[:2] == [6, 4]


class _Refusing(torch.optim.lr_scheduler.ConstantLR):
    refuses = False

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        if self.refuses:
            raise ValueError("not this one")
        super().load_state_dict(state_dict)


def test_no_step_is_taken_after_a_restore_that_failed_half_way(schedule: Schedule, tmp_path: Path) -> None:
    """Nor is its state saved; a restore that ends makes it sound again."""
    training = small()
    scheduler = _Refusing(training.optimizers[0])
    with attached(training, schedule, tmp_path, scheduler=scheduler) as ckpt:
        train(training, ckpt, 3)
        before = weights(training)
        training.iteration()
        ckpt.step()
        _Refusing.refuses = True
        with pytest.raises(InputError, match="not this one"):
            ckpt.restore(3)
        training.iteration()
        with pytest.raises(InputError, match=r"step: restore\(\) did not end"):
            ckpt.step()
        _Refusing.refuses = False
        assert ckpt.restore(3) == 3
        assert same(weights(training), before)
        train_more(training, ckpt, 1)
    assert iterations(tmp_path)[0] == 4


def test_a_restore_that_changed_nothing_leaves_the_training_as_it_was(schedule: Schedule, tmp_path: Path) -> None:
    """There is no such iteration."""
    training = small()
    with attached(training, schedule, tmp_path) as ckpt:
        train(training, ckpt, 3)
        with pytest.raises(StoreError, match="has no checkpoint of iteration 77; it has"):
            ckpt.restore(77)
        train_more(training, ckpt, 1)
    assert iterations(tmp_path)[0] == 4


# Errors


def test_the_last_iteration_is_saved_after_a_caught_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the store, under `wait`, in the middle of a step()."""
    training = small()
    with attached(training, compiled(small, interval=3), tmp_path) as ckpt:

        def refuse(*_: int) -> None:
            raise StoreError("the disk is full")

        train_more(training, ckpt, 2)
        monkeypatch.setattr(ckpt._handle, "try_acquire", lambda *_: None)
        monkeypatch.setattr(ckpt._handle, "acquire", refuse)
        with pytest.raises(StoreError, match="the disk is full"):
            train_more(training, ckpt, 1)
        monkeypatch.undo()
        train_more(training, ckpt, 2)
    assert iterations(tmp_path)[0] == 5


def test_closing_tries_a_last_write_that_failed_again(schedule: Schedule, tmp_path: Path) -> None:
    """The saver may not write for a moment; that is told."""
    training, told = small(), list[str]()
    limits: list[tuple[int, int]] = []

    def told_of(line: str) -> None:
        told.append(line)
        if limits:
            pid = ckpt._handle.saver_pid
            assert pid is not None
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits.pop())

    with attached(training, schedule, tmp_path, notify=told_of) as ckpt:
        train(training, ckpt, 2)
        ckpt.save(keep=False)
        pid = ckpt._handle.saver_pid
        assert pid is not None
        limits.append(resource.prlimit(pid, resource.RLIMIT_FSIZE))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, limits[0][1]))
        train_more(training, ckpt, 1)
    assert told and not limits
    assert iterations(tmp_path)[0] == 3


def test_what_goes_wrong_later_keeps_its_words(schedule: Schedule, tmp_path: Path) -> None:
    """The first is raised; the others are told."""
    training, told = small(), list[str]()
    with attached(training, schedule, tmp_path, notify=told.append) as ckpt:
        ckpt._handle._saver.fail("first of three")
        ckpt._handle._saver.fail("second of three")
        ckpt._handle._saver.fail("third of three")
        with pytest.raises(StoreError, match="first of three"):
            ckpt._handle.poll()
    assert [line for line in told if "of three" in line] == ["second of three", "third of three"]


# Forking


def _in_child(act: Callable[[], object]) -> int:
    """The exit code of a forked child that does this; 99 where it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads run: that is the point
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 99


def test_a_forked_child_drives_nothing_and_says_so_once(schedule: Schedule, tmp_path: Path) -> None:
    """It evaluates, trains, saves, restores and leaves the block; its parent goes on, and so does the saver."""
    training, told = small(), list[str]()
    with attached(training, schedule, tmp_path / "store", notify=told.append) as ckpt:
        train(training, ckpt, 3)
        pid = ckpt._handle.saver_pid

        def child() -> None:
            training.models[0].eval()
            training.models[0](torch.zeros(4, 6))
            training.models[0].train()
            with ckpt:
                for _ in range(3):
                    training.iteration()
                    ckpt.step()
                ckpt.save()
                assert ckpt.restore() == 3
                assert ckpt.stats().iterations == 3
            ckpt.close()
            (tmp_path / "told").write_text("\n".join(told))

        assert _in_child(child) == 0
        lines = (tmp_path / "told").read_text().splitlines()
        assert len(lines) == 1
        assert re.search(rf"step\(\) does nothing in a forked process; .* process {os.getpid()}", lines[0])
        assert told == []
        train_more(training, ckpt, 3)
        assert ckpt._handle.saver_pid == pid
    assert iterations(tmp_path / "store")[0] == 6


def test_a_child_hangs_on_no_lock_that_another_thread_held(schedule: Schedule, tmp_path: Path) -> None:
    """At the moment of the fork one works on a checkpoint."""
    training = small()
    with attached(training, schedule, tmp_path, notify=lambda _: None) as ckpt:
        train(training, ckpt, 2)
        entered, leave = threading.Event(), threading.Event()

        def work() -> None:
            with ckpt._executor.inside, ckpt._handle.shared._mutex:
                entered.set()
                leave.wait()

        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()

        def child() -> None:
            training.iteration()
            ckpt.step()
            ckpt.save()
            ckpt.restore()
            ckpt.close()

        code = _in_child(child)
        leave.set()
        thread.join()
        assert code == 0
        train_more(training, ckpt, 1)
    assert iterations(tmp_path)[0] == 3


def test_forked_workers_and_evaluation_go_on_as_without_checkpoints(schedule: Schedule, tmp_path: Path) -> None:
    """multiprocessing's children, which end as Python programs do."""
    training = small()
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4, num_workers=2, multiprocessing_context="fork")
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with attached(training, schedule, tmp_path) as ckpt:
            for epoch in range(2):
                assert len([batch for (batch,) in loader]) == 2
                train_more(training, ckpt, 2)
                evaluation = context.Process(target=training.models[0], args=(torch.zeros(4, 6),))
                evaluation.start()
                evaluation.join(HANGS_S)
                assert evaluation.exitcode == 0, epoch
    assert iterations(tmp_path)[0] == 4


# SIGTERM

SCRIPT = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, {here!r})
    import checkflow
    from test_attach import small
    training = small()
    {before}
    with checkflow.attach(
        training.model, training.optimizer, schedule={schedule!r}, store={store!r}, when_full="wait",
        notify=lambda line: print("told", line, flush=True), tell=lambda line: None, {options}
    ) as ckpt:
        def train():
            for iteration in range(ckpt.restore(), 10**9):
                {inside}
                training.iteration()
                {end}
                ckpt.step()
                print(iteration + 1, flush=True)
                {between}
        {run}
"""


def _script(
    tmp_path: Path, schedule: Schedule, *, before: str = "", inside: str = "pass", end: str = "pass",
    between: str = "pass", options: str = "", run: str = "train()",
) -> Program:  # fmt: skip
    write_schedule(tmp_path / "schedule.json", schedule)
    text = textwrap.dedent(SCRIPT).format(
        here=str(Path(__file__).parent), schedule=str(tmp_path / "schedule.json"), store=str(tmp_path / "store"),
        before=before, inside=inside, end=end, between=between, options=options, run=run,
    )  # fmt: skip
    return Program(text, stderr=tmp_path / "stderr")


def _completed(out: str, at_least: int) -> int:
    return max([at_least, *(int(line) for line in out.split("\n") if line.isdigit())])


@pytest.mark.parametrize("moment", ["inside", "end", "between"])
def test_a_terminated_training_loses_no_completed_iteration_at_any_interval(moment: str, tmp_path: Path) -> None:
    """The signal comes while an iteration runs, at its end, and between two; the state is an uninterrupted run's."""
    waits = "import socket; heard, hears = socket.socketpair(); hears.setblocking(False)"
    process = _script(
        tmp_path, compiled(small, interval=20), before=f"{waits}; signal.set_wakeup_fd(hears.fileno())",
        **{moment: "iteration == 16 and (print('now', flush=True), heard.recv(1))"},
    )  # fmt: skip
    process.until("now")
    process.send_signal(signal.SIGTERM)
    code, out = process.end()
    assert code == -signal.SIGTERM
    completed = _completed(out, 16)
    training = small()
    with attached(training, compiled(small, interval=20), tmp_path / "store", notify=lambda _: None) as ckpt:
        restored = ckpt.restore()
    assert restored >= completed and restored in (17, 18)
    whole = small()
    for _ in range(restored):
        whole.iteration()
    assert same(weights(whole), weights(training))


def test_an_iteration_longer_than_the_deadline_is_not_waited_for(tmp_path: Path) -> None:
    """What is staged is durable, and what is lost is told."""
    process = _script(
        tmp_path, compiled(small, interval=3), options="sigterm_deadline_s=2.0",
        inside="iteration == 5 and (print('now', flush=True), [time.sleep(0.05) for _ in iter(int, 1)])",
    )  # fmt: skip
    process.until("now")
    process.send_signal(signal.SIGTERM)
    code, out = process.end()
    assert code == -signal.SIGTERM
    assert "SIGTERM: the last iteration is not durable at the deadline" in out
    training = small()
    with attached(training, compiled(small, interval=3), tmp_path / "store", notify=lambda _: None) as ckpt:
        assert ckpt.restore() == 3


def test_a_handler_that_lets_training_go_on_is_called_for_each_signal(tmp_path: Path) -> None:
    """Once for each, after the iteration was saved."""
    process = _script(
        tmp_path, compiled(small, interval=50),
        before="signal.signal(signal.SIGTERM, lambda *_: print('heard', ckpt.status().durable_iteration, flush=True))",
        end="iteration in (7, 19) and os.kill(os.getpid(), signal.SIGTERM)",
        between="iteration == 30 and sys.exit(5)",
    )  # fmt: skip
    code, out = process.end()
    assert code == 5, out
    assert [line for line in out.splitlines() if line.startswith("heard")] == ["heard 8", "heard 20"]


def test_a_signal_in_a_training_loop_of_another_thread_is_passed_on_by_the_main_one(tmp_path: Path) -> None:
    """Python's handlers are the main thread's."""
    process = _script(
        tmp_path, compiled(small, interval=50),
        before="signal.signal(signal.SIGTERM, lambda *_: (print(threading.current_thread().name), sys.exit(7)))",
        run="thread = threading.Thread(target=train, daemon=True); thread.start(); thread.join()",
    )  # fmt: skip
    process.until("9")
    process.send_signal(signal.SIGTERM)
    code, out = process.end()
    assert code == 7
    assert "MainThread" in out
    training = small()
    with attached(training, compiled(small, interval=50), tmp_path / "store", notify=lambda _: None) as ckpt:
        assert ckpt.restore() >= 9


def test_sigterm_while_saving_waits_for_no_lock_of_its_own(schedule: Schedule, tmp_path: Path) -> None:
    """It comes while save() asks the saver, which is done under a lock."""
    before = """
from checkflow.store.memory.trainer_slots import Slots
ask = Slots.ask
def asked(self, *, keep):
    with self._shared._mutex:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    return ask(self, keep=keep)
"""
    process = _script(
        tmp_path, schedule, before=f"exec({before!r})", options="sigterm_deadline_s=2.0",
        between="Slots.ask = asked; ckpt.save()",
    )  # fmt: skip
    assert process.end()[0] == -signal.SIGTERM
    training = small()
    with attached(training, schedule, tmp_path / "store", notify=lambda _: None) as ckpt:
        assert ckpt.restore() == 1


def test_a_signal_while_closing_is_passed_on_when_all_is_durable(tmp_path: Path) -> None:
    """The last iteration is on disk, and the process ends by the signal."""
    process = _script(
        tmp_path, compiled(small, interval=50),
        before="from checkflow.store.trainer.handle import StoreHandle as H; drain = H._drain; "
        "H._drain = lambda self, until: (os.kill(os.getpid(), signal.SIGTERM), drain(self, until))[1]",
        between="if iteration == 4: break",
    )  # fmt: skip
    assert process.end()[0] == -signal.SIGTERM
    training = small()
    with attached(training, compiled(small, interval=50), tmp_path / "store", notify=lambda _: None) as ckpt:
        assert ckpt.restore() == 5


# What is told


def test_one_line_at_attach_and_one_at_restore(
    schedule: Schedule, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On stderr, unless asked otherwise; they are no warnings."""
    training = small()
    with checkflow.attach(training.model, training.optimizer, schedule=schedule, store=tmp_path) as ckpt:
        train(training, ckpt, 2)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(
        rf"checkflow: {tmp_path}: a checkpoint every iteration, [\d.]+ KiB, durable each 30 s, .*", lines[0]
    )
    assert lines[1] == f"checkflow: {tmp_path}: no checkpoint yet; begins with iteration 1"
    told: list[str] = []
    with attached(training, schedule, tmp_path, interval=4, tell=told.append) as ckpt:
        ckpt.restore()
    assert re.search(r": a checkpoint every 4 iterations, .* durable at once$", told[0])
    assert re.search(r": resumed iteration 2 in \d+\.\d s$", told[1])
    assert capfd.readouterr().err == ""
