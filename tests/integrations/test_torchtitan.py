"""A training that torchtitan's manager would checkpoint, killed anywhere and resumed, ends the same, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'checkflow[torchtitan]'")

import torch

from checkflow.errors import InputError
from checkflow.integrations.torchtitan import CheckflowManager
from checkflow.store.format.reader import list_checkpoints

HERE = Path(__file__).parent
KILLS = ["micro:5", "micro:6", "update:8", "validate:8", "micro:1", "update:12"]  # in an epoch, at its border, ...


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings, in one process that forks each."""
    root = tmp_path_factory.mktemp("lives")
    command = [sys.executable, str(HERE / "titans.py"), str(root), "plain:0", "never:0", *KILLS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return root


def told(lives: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((lives / case / "final.json").read_text())
    return found


def order(lives: Path, case: str) -> list[str]:
    """The micro-batches that were trained on, with their steps; of a step that was begun twice, the last time."""
    lines = (lives / case / "order").read_text().splitlines()
    last = {step: at for at, step in enumerate(line.split()[0] for line in lines)}
    sizes = Counter(line.split()[0] for line in (lives / "plain:0" / "order").read_text().splitlines())
    return [line for step, at in last.items() for line in lines[at + 1 - sizes[step] : at + 1]]


@pytest.mark.parametrize("case", ["never:0", *KILLS])
def test_killed_and_resumed_it_ends_the_same(lives: Path, case: str) -> None:
    """Weights, optimizer, rates, generator, the trainer's own state, the loader's, and the order of data."""
    assert told(lives, case) == told(lives, "plain:0")
    assert order(lives, case) == order(lives, "plain:0")
    statuses = (lives / case / "statuses").read_text().split()
    assert statuses == (["0"] if case == "never:0" else ["-9", "0"])


@pytest.mark.parametrize("case", [case for case in KILLS if case != "micro:1"])
def test_no_completed_step_is_trained_again(lives: Path, case: str) -> None:
    """Of the step that was killed, its micro-batches; of those before, none."""
    at = int(case.split(":")[1])
    begun = Counter(line.split()[0] for line in (lives / case / "order").read_text().splitlines())
    again = {int(step) for step, count in begun.items() if count > 2}
    assert again <= {at}


def test_what_is_durable_and_retained_is_as_configured(lives: Path) -> None:
    """The last step, and one of those before, as many as the disk could take."""
    newest, older = (found.iteration for found in list_checkpoints(lives / "never:0" / "checkpoint"))
    assert newest == 12 > older


def config(**options: Any) -> Any:
    return CheckflowManager.Config(enable=True, **options)


def built(folder: Path, **options: Any) -> CheckflowManager:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return CheckflowManager(
        config(**options),
        dataloader=None,
        model_parts=[model],
        optimizers=[optimizer],
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        states={},
        base_folder=str(folder),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"initial_load_path": "/weights"},
        {"exclude_from_loading": ["optimizer"]},
        {"create_seed_checkpoint": True},
        {"load_only": True},
    ],
)
def test_what_it_does_not_do_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    (field,) = options
    with pytest.raises(InputError, match=rf"checkpoint\.{field}: checkflow does not do that; "):
        built(tmp_path, **options)


def test_it_is_attached_when_the_trainer_loads(tmp_path: Path) -> None:
    manager = built(tmp_path)
    with pytest.raises(InputError, match="is attached when the trainer loads; call load"):
        manager.save(1)
    assert manager.load() is False
    manager.close()


def test_a_disabled_one_does_nothing(tmp_path: Path) -> None:
    manager = CheckflowManager(
        CheckflowManager.Config(), dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None, states={}
    )
    assert not manager.load() and not manager.save(1)
    manager.close()
    assert not list(tmp_path.iterdir())
