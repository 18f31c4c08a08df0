"""What Trainer's order of data takes more for than the number of steps is kept, or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lives
import pytest
from lives import check_ranks, order, plain, statuses, told
from once import once

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'checkflow[transformers]'")
pytest.importorskip("accelerate")

HERE = Path(__file__).parent
SCRIPT = HERE / "trainer_orders.py"

# Two passes of 7 steps; each fifth is evaluated.
KILLS = [
    "grouped:step:2",  # the first pass's order was drawn before the steps drew
    "grouped:step:9",
    "owned:step:9",
    "stream:step:9",  # in the second pass of what has no length
    "persistent:step:5",  # evaluated once; neither these workers nor the next pass's are seeded again
    "persistent:step:9",
    "cut:step:6",  # in the second pass, for the first had 3 steps
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [*dict.fromkeys(plain(case) for case in KILLS), "persistent:never:0", *KILLS]
    return once(tmp_path_factory, "transformers-orders", lambda folder: lives.run(SCRIPT, folder, *cases))


@pytest.mark.parametrize("case", KILLS)
def test_an_order_goes_on_as_it_was_drawn(root: Path, case: str) -> None:
    """And all else is as if the training had not been killed."""
    assert statuses(root, case) == [-9, 0]
    assert order(root, case) == order(root, plain(case))
    assert told(root, case) == told(root, plain(case))


def test_workers_that_persist_are_seeded_as_without_checkpoints(root: Path) -> None:
    assert told(root, "persistent:never:0") == told(root, "persistent:plain:0")


RANKS = ["unseeded:step:5", "stream:step:5"]  # a pass is 4 steps; the stream's is 3, and some batches


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [*map(plain, RANKS), *RANKS]
    return once(
        tmp_path_factory, "transformers-orders-ranks", lambda folder: lives.run(SCRIPT, folder, *cases, ranks=2)
    )


@pytest.mark.parametrize("case", RANKS)
def test_an_order_of_ranks_goes_on_as_it_was_drawn(of_ranks: Path, case: str) -> None:
    check_ranks(of_ranks, case)


def said(root: Path, case: str, ranks: int) -> str:
    """On the error output, by a training that ends with an error."""
    command = [sys.executable, str(SCRIPT), str(root), str(ranks), case]
    done = subprocess.run(command, capture_output=True, text=True)
    last = root / case / "0" if ranks > 1 else root / case
    assert statuses(last, ".")[0] == 1
    return done.stderr


def test_batches_of_another_process_are_refused(tmp_path: Path) -> None:
    assert "InputError: dispatch_batches: gives all processes their batches" in said(tmp_path, "dispatched:never:0", 2)


def test_a_sampler_that_draws_from_what_nobody_finds_is_refused(tmp_path: Path) -> None:
    found = said(tmp_path, "hidden:never:0", 1)
    assert "train_dataloader: its sampler, a Unseen, gives another order each time, and not from" in found
    assert found.endswith("or by the number of the pass, which set_epoch is given\n")


def test_a_training_that_ended_makes_no_further_step(tmp_path: Path) -> None:
    """Within a pass, where Trainer alone begins another step before it sees that all are done."""
    program = """
import sys, torch
from pathlib import Path
from trainers import final, make
torch.set_num_threads(1)
for arguments in ({"max_steps": 5}, {"max_steps": 5}):
    trainer = make(Path(sys.argv[1]), arguments=arguments)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5, trainer.state.global_step
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
