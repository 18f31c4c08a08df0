"""However a run is left: its last completed iteration is saved, or it is told which iterations are in no checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import checkflow

LOST = "iterations 4 to 5 are in no checkpoint, the one before is of iteration 3"
ADVICE = "call save() or close() right after the step() that is the last"


class Run:
    """A training with a checkpoint every third iteration unless said, and what it was told."""

    def __init__(self, store: Path, interval: int = 3) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.told: list[str] = []
        self.store = store
        self.ckpt = checkflow.attach(
            self.model,
            self.optimizer,
            store=store,
            interval=interval,
            when_full="wait",
            notify=self._notified,
            tell=lambda _: None,
        )

    def _notified(self, line: str) -> None:
        self.told.append(line.removeprefix(f"{self.store}: "))

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            self.model(torch.randn(2, 8)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ckpt.step()

    def newest(self) -> int:
        """What the next run restores."""
        again = Run(self.store)
        with again.ckpt:
            return again.ckpt.restore()


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ZeroDivisionError()], ids=repr)
def test_an_error_tells_what_it_leaves_in_no_checkpoint(error: BaseException, tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(type(error)), run.ckpt:
        run.train(5)
        raise error
    assert run.told == [f"left by {type(error).__name__}: {LOST}; {ADVICE}"]
    assert run.newest() == 3


def test_so_does_a_loop_that_ends_a_generator(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def epochs() -> Iterator[int]:
        with run.ckpt:
            while True:
                run.train(1)
                yield run.ckpt.stats().iterations

    trained = epochs()
    assert [next(trained) for _ in range(5)] == [1, 2, 3, 4, 5]
    trained.close()  # type: ignore[attr-defined]
    assert run.told == [f"left by GeneratorExit: {LOST}; {ADVICE}"]


def test_so_does_a_close_after_the_next_iteration_has_begun(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.ckpt:
        run.train(5)
        run.model(torch.randn(2, 8))
    assert run.told == [f"close: {LOST}; {ADVICE}"]
    assert run.newest() == 3


@pytest.mark.parametrize(
    ("iterations", "what"),
    [
        (1, "iteration 1 is in no checkpoint, there is none before"),
        (4, "iteration 4 is in no checkpoint, the one before"),
    ],
)
def test_a_single_iteration_and_no_checkpoint_have_their_words(iterations: int, what: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(SystemExit), run.ckpt:
        run.train(iterations)
        sys.exit()
    assert len(run.told) == 1 and run.told[0].startswith(f"left by SystemExit: {what}")


@pytest.mark.parametrize("interval", [1, 5])
def test_nothing_is_told_where_the_last_iteration_was_due(interval: int, tmp_path: Path) -> None:
    run = Run(tmp_path, interval)
    with pytest.raises(SystemExit), run.ckpt:
        run.train(5)
        run.model(torch.randn(2, 8)).sum().backward()  # of the next, which is the one that runs
        sys.exit()
    assert not run.told
    assert run.newest() == 5


def test_nothing_is_told_where_the_last_iteration_was_saved_or_restored(tmp_path: Path) -> None:
    saved = Run(tmp_path)
    with pytest.raises(SystemExit), saved.ckpt:
        saved.train(5)
        saved.ckpt.save()
        sys.exit()
    resumed = Run(tmp_path)
    with pytest.raises(SystemExit), resumed.ckpt:
        assert resumed.ckpt.restore() == 5
        sys.exit()
    closed = Run(tmp_path)
    with closed.ckpt:
        closed.ckpt.restore()
        closed.train(2)
    assert not saved.told + resumed.told + closed.told
    assert closed.newest() == 7


def test_nothing_is_told_where_no_iteration_ended_or_none_could(tmp_path: Path) -> None:
    begun = Run(tmp_path)
    with pytest.raises(ZeroDivisionError), begun.ckpt:
        begun.model(torch.randn(2, 8))
        raise ZeroDivisionError
    Run(tmp_path).ckpt.close()
    trained = Run(tmp_path)
    with trained.ckpt:
        trained.train(1)
    refused = Run(tmp_path)
    with pytest.raises(checkflow.InputError, match="nothing was restored"), refused.ckpt:
        refused.train(1)
    assert not begun.told + trained.told + refused.told


def test_nothing_is_told_again_where_step_raised_why_there_is_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, interval=1)
    with pytest.raises(checkflow.InputError, match=r"^model/late: ") as refusal, run.ckpt:
        run.train(2)
        run.model.register_buffer("late", torch.ones(1).to_sparse())
        run.train(1)
    assert not run.told, (run.told, refusal.value)


def test_after_a_restore_in_mid_run_it_counts_from_there(tmp_path: Path) -> None:
    """What was trained before it is given up on purpose."""
    run = Run(tmp_path)
    with pytest.raises(SystemExit), run.ckpt:
        run.train(5)
        assert run.ckpt.restore() == 3
        run.train(1)
        sys.exit()
    assert run.told == [
        f"left by SystemExit: iteration 4 is in no checkpoint, the one before is of iteration 3; {ADVICE}"
    ]


SCRIPT = """
import atexit, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_lost import Run
atexit.register(lambda: print(run.told))  # after what attach registers
run = Run(Path(sys.argv[2]))
run.train(5)
"""


def test_a_process_that_exits_without_close_tells_it(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str([f"exit: {LOST}; {ADVICE}"])
