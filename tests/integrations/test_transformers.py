"""Hugging Face's Trainer, killed anywhere and resumed, ends as one that was never interrupted, to the bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lives
import pytest
from lives import check_ranks, order, statuses, told
from once import once

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'checkflow[transformers]'")
pytest.importorskip("accelerate")

HERE = Path(__file__).parent
ITEMS, EPOCH, ACCUMULATED, BATCH = 40, 7, 3, 2

# Where it is killed, and the step that it resumes from. 7 steps are an epoch; each fifth is evaluated.
KILLS = {
    "hf:step:10": 10,  # within an epoch, as step 11 begins
    "hf:step:7": 7,  # at the border, as the next epoch's first step begins
    "hf:epoch:7": 6,  # at the border, while callbacks are told that the epoch ends
    "hf:evaluate:10": 9,  # the step and its evaluation are repeated
    "hf:substep:9": 9,  # between the micro-batches of step 10
    "hf:raise:9": 9,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = "hf:plain:0", "hf:never:0", *KILLS
    return once(tmp_path_factory, "transformers", lambda folder: lives.run(HERE / "trainers.py", folder, *cases))


def test_checkpoints_change_nothing(root: Path) -> None:
    """Not even what evaluations and logs say."""
    assert told(root, "hf:never:0") == told(root, "hf:plain:0")
    assert order(root, "hf:never:0") == order(root, "hf:plain:0")


@pytest.mark.parametrize("case", KILLS)
def test_killed_and_resumed_it_ends_the_same(root: Path, case: str) -> None:
    """Weights, optimizer, scheduler, generators, log history, Trainer's state, a callback's, and the order of data."""
    assert statuses(root, case) == [1 if ":raise:" in case else -9, 0]
    assert told(root, case)["final"] == told(root, "hf:plain:0")["final"]
    assert order(root, case) == order(root, "hf:plain:0")


@pytest.mark.parametrize("case", KILLS)
def test_what_was_trained_on_is_not_loaded_again(root: Path, case: str) -> None:
    """The position is one of the sampler: no item of a skipped batch is asked for."""
    epochs, steps = divmod(KILLS[case], EPOCH)
    skipped = epochs * ITEMS + steps * ACCUMULATED * BATCH
    assert told(root, case)["loaded"] == told(root, "hf:plain:0")["loaded"][skipped:]


RANKS = [
    f"hf:{kill}" for kill in ("step:5", "step:4", "epoch:4", "evaluate:5", "substep:6", "raise:6")
]  # an epoch is 4


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = "hf:plain:0", "hf:never:0", *RANKS
    return once(
        tmp_path_factory,
        "transformers-ranks",
        lambda folder: lives.run(HERE / "trainers.py", folder, *cases, ranks=2),
    )


@pytest.mark.parametrize("case", RANKS)
def test_killed_ranks_end_as_those_that_were_not(of_ranks: Path, case: str) -> None:
    check_ranks(of_ranks, case)


def test_checkpoints_change_nothing_of_ranks(of_ranks: Path) -> None:
    for rank in "01":
        assert told(of_ranks, f"hf:never:0/{rank}") == told(of_ranks, f"hf:plain:0/{rank}")


def run(what: str, folder: Path, *, fails: bool = False) -> str:
    """What a process of trainers.py says that does this."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + what, str(folder)], cwd=HERE, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr.splitlines()[-1] if fails else done.stdout


PROGRAM = """
import json, shutil, sys, torch
from pathlib import Path
from checkflow.integrations.transformers import *
from trainers import *
torch.set_num_threads(1)
folder = Path(sys.argv[1])
"""


def test_folders_of_trainer_come_from_a_store_and_go_into_one(tmp_path: Path) -> None:
    """A plain Trainer resumes what was exported, and a resumable one begins a store with what a plain one saved."""
    run(
        """
life(folder / "plain", "plain", 0, arguments={"save_strategy": "steps", "save_steps": 9, "logging_steps": 3})
life(folder / "killed", "step", 9, arguments={"logging_steps": 3})
written = to_folder(make(folder / "killed", arguments={"logging_steps": 3}))
assert written == folder / "killed" / "checkpoint-9", written
for name, kind, source in (("out", "plain", written), ("in", "never", folder / "plain" / "checkpoint-9")):
    trainer = make(folder / name, kind, arguments={"logging_steps": 3})
    trainer.train(resume_from_checkpoint=str(source))
    (folder / name / "final.json").write_text(json.dumps({"final": final(trainer)}, default=str))
life(folder / "in", "never", 0, arguments={"logging_steps": 3})   # all is done: it trains no further
        """,
        tmp_path,
    )
    expected = told(tmp_path, "plain")["final"]
    for name in ("out", "in"):
        found = told(tmp_path, name)["final"]
        assert {k: found[k] for k in ("tensors", "scheduler", "groups")} == {
            k: expected[k] for k in ("tensors", "scheduler", "groups")
        }
        assert [line.get("loss") for line in found["history"]] == [line.get("loss") for line in expected["history"]]


def test_ranks_take_what_verifies_on_each(tmp_path: Path) -> None:
    """Also as one process, which goes on with the first one's part of the data."""
    said = run(
        """
for name, when, step in (("a", "step", 5), ("b", "plain", 0)):
    lives.job(folder / name, "hf", when, step, train, 2)
newest, *_ = sorted((folder / "a" / "store" / "rank-1-of-2").glob("*-iteration-*"), reverse=True)
(file,) = newest.glob("model*.safetensors")
file.write_bytes(b"")
shutil.copytree(folder / "a" / "store", folder / "c" / "store")
lives.job(folder / "a", "hf", "never", 0, train, 2)
lives.life(folder / "c", "hf", "never", 0, train)
print(newest.name)
        """,
        tmp_path,
    )
    damaged = int(said.split()[-1].rpartition("-")[2])
    for rank in "01":
        assert told(tmp_path, f"a/{rank}")["final"] == told(tmp_path, f"b/{rank}")["final"]
        steps = [int(line.split()[0]) for line in (tmp_path / "a" / rank / "order").read_text().splitlines()]
        assert steps.count(damaged) > steps.count(1)  # it is taken again
    assert statuses(tmp_path, "c") == [0]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "life(folder, 'step', 3)\nmake(folder).train()",
            "holds checkpoints of an earlier training; train(resume_from",
        ),
        (
            "life(folder, 'never', 0)\n"
            "for path in (folder / 'store').rglob('*.safetensors'): path.write_bytes(b'')\n"
            "make(folder).train(resume_from_checkpoint=True)",
            "CorruptStoreError",
        ),
        ("to_folder(make(folder))", "has no checkpoint to export; give the store of a training"),
        ("CheckflowCallback('')", "store: is empty; give a directory"),
        ("make(folder, scheduler=1)", "scheduler: is the Trainer's own, and taken along; leave it out"),
        ("make(folder, metadata={'trainer': 1}).train()", "metadata: 'trainer' is what Trainer keeps"),
        (
            "make(folder, arguments={'auto_find_batch_size': True}).train(resume_from_checkpoint=True)",
            "auto_find_batch_size: begins a training anew within itself; give its batch size",
        ),
        (
            "trainer = make(folder, 'plain')\ntrainer.add_callback(CheckflowCallback(folder))\ntrainer.train()",
            "this Trainer cannot resume; make it with resumable(Trainer)(...)",
        ),
        (
            "trainer = make(folder)\ntrainer.remove_callback(CheckflowCallback)\ntrainer.train()",
            "has no store; give callbacks=[CheckflowCallback('checkpoints')]",
        ),
    ],
    ids=[
        "not resumed",
        "damaged",
        "nothing to export",
        "empty",
        "scheduler",
        "metadata",
        "batch size",
        "plain",
        "no callback",
    ],
)
def test_what_is_refused(what: str, says: str, tmp_path: Path) -> None:
    """In one line, which says what to do."""
    assert says in run(what, tmp_path, fails=True)


def test_what_is_evaluated_at_the_start_is_not_evaluated_again(tmp_path: Path) -> None:
    """A resumed run has the log history, and a callback's count, of one that was not; the user's argument stays."""
    run(
        """
at_the_start = {"eval_on_start": True, "num_train_epochs": 1}
life(folder / "a", "step", 3, arguments=at_the_start)
again = make(folder / "a", "never", arguments=at_the_start)
again.train(resume_from_checkpoint=True)
life(folder / "b", "plain", 0, arguments=at_the_start)
assert again.args.eval_on_start
assert json.loads(json.dumps(final(again))) == json.loads((folder / "b" / "final.json").read_text())["final"]
        """,
        tmp_path,
    )


def test_the_best_model_is_no_checkpoint(tmp_path: Path) -> None:
    """Trainer loads it when training has ended; a store that is resumed then still has the last step's weights."""
    run(
        """
best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 5, "greater_is_better": True}
trainer = make(folder / "a", "never", arguments=best)
trainer.train(resume_from_checkpoint=True)
assert trainer.state.best_global_step < 20, trainer.state.best_global_step
life(folder / "b", "plain", 0, arguments=best | {"load_best_model_at_end": False})
again = make(folder / "a", "never", arguments=best | {"load_best_model_at_end": False})
again.train(resume_from_checkpoint=True)
assert final(again)["tensors"] == json.loads((folder / "b" / "final.json").read_text())["final"]["tensors"]
assert final(trainer)["tensors"] != final(again)["tensors"]
        """,
        tmp_path,
    )


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    """Interrupted by itself after some steps, it is run again."""
    command = [sys.executable, "-m", "checkflow.examples.transformers_trainer", "--store", str(tmp_path / "store")]
    first = subprocess.run([*command, "--stop-after", "5"], cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == -9, first.stderr
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert re.search("resumed iteration [1-5] ", second.stderr), second.stderr  # a busy machine's copies may be late
    assert "steps 30" in second.stdout
