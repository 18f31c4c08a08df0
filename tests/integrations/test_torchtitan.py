"""A training that torchtitan's manager would checkpoint, killed anywhere and resumed, ends the same, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'checkflow[torchtitan]'")

import torch
from lives import WHOLE, begun, check_ranks, order, plain, run, statuses, told
from once import once

from checkflow.errors import InputError
from checkflow.integrations.torchtitan import CheckflowManager
from checkflow.store.format.reader import list_checkpoints

HERE = Path(__file__).parent
WHERE = ("micro:5", "micro:6", "update:8", "validate:8", "micro:1", "update:12")  # in an epoch, at its border, ...
KILLS = [f"titan:{where}" for where in WHERE]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = "titan:plain:0", "titan:never:0", *KILLS
    return once(tmp_path_factory, "titans", lambda folder: run(HERE / "titans.py", folder, *cases))


@pytest.mark.parametrize("case", ["titan:never:0", *KILLS])
def test_killed_and_resumed_it_ends_the_same(root: Path, case: str) -> None:
    """Weights, optimizer, rates, generator, the trainer's own state, the loader's, and the order of data."""
    assert told(root, case) == told(root, plain(case))
    assert order(root, case) == order(root, plain(case))
    assert statuses(root, case) == ([0] if case == "titan:never:0" else [-9, 0])


@pytest.mark.parametrize("case", KILLS)
def test_no_completed_step_is_trained_again(root: Path, case: str) -> None:
    """Of the step that was killed, its micro-batches; of those before, none."""
    assert set(begun(root, case) - begun(root, plain(case))) <= {case.split(":")[2]}


RANKS = [f"{kind}:{where}" for kind in ("sharded", "replicated") for where in ("micro:5", "update:8", "validate:8")]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [f"{kind}:{when}:0" for kind in ("sharded", "replicated") for when in WHOLE] + RANKS
    return once(tmp_path_factory, "titans-ranks", lambda folder: run(HERE / "titans.py", folder, *cases, ranks=2))


@pytest.mark.parametrize("case", RANKS)
def test_killed_ranks_end_as_those_that_were_not(of_ranks: Path, case: str) -> None:
    """By FSDP2, of shards and of replicas."""
    check_ranks(of_ranks, case)


def test_what_is_durable_and_retained_is_as_configured(root: Path) -> None:
    """The last step, and of those before at most one."""
    newest, *others = (found.iteration for found in list_checkpoints(root / "titan:never:0" / "store" / "checkpoint"))
    assert newest == 12 and len(others) < 2


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
