"""What of a Trainer's fit cannot come back is refused when it begins, or told by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'checkflow[lightning]'")

import fits
import lightning.pytorch as pl
import torch

from checkflow.errors import InputError
from checkflow.integrations._lightning_state import Progress
from checkflow.integrations.lightning import CheckflowCallback

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(module: fits.Net, callback: CheckflowCallback, *others: Any, **given: Any) -> pl.Trainer:
    """With the others before it."""
    torch.set_num_threads(1)
    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False} | given
    trainer = pl.Trainer(
        callbacks=[*others, callback], enable_checkpointing=False, enable_model_summary=False, **settings
    )
    trainer.fit(module, fits.stateful(), torch.utils.data.DataLoader(fits.data(6, 2), batch_size=2))
    return trainer


def follower(folder: Path, told: list[str]) -> CheckflowCallback:
    return CheckflowCallback(folder / "store", tell=lambda _: None, notify=told.append)


def test_a_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    """The fit that follows begins at its beginning; a rehearsal over a store trains its batch, and leaves the store."""
    told = list[str]()
    callback = follower(tmp_path, told)
    fit(fits.Net(tmp_path), callback, fast_dev_run=True)
    assert told == [f"{tmp_path / 'store'}: fast_dev_run makes no checkpoints, and resumes none"]
    assert not (tmp_path / "store").exists()
    assert fit(fits.Net(tmp_path), callback).global_step == fits.ITEMS // fits.BATCH
    assert fit(fits.Net(tmp_path), callback, fast_dev_run=True).global_step == 1


def test_a_store_of_an_older_version_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of a batch that was held, nor of what metrics had counted."""
    with monkeypatch.context() as older:
        now = Progress.state_dict
        dropped = ("ahead", "counted")
        older.setattr(
            Progress, "state_dict", lambda self: {key: each for key, each in now(self).items() if key not in dropped}
        )
        with pytest.raises(RuntimeError, match="as asked"):
            fit(fits.Net(tmp_path), follower(tmp_path, []), fits.Kill("raise", 5))
    told = list[str]()
    assert fit(fits.Net(tmp_path), follower(tmp_path, told)).global_step == fits.ITEMS // fits.BATCH
    assert not told


class Unfreezing(pl.callbacks.BaseFinetuning):  # type: ignore[misc]
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...


def test_groups_that_come_later_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"callbacks: Unfreezing adds parameter groups .* all groups from the start"):
        fit(fits.Net(tmp_path), follower(tmp_path, []), Unfreezing())


class Seeking(pl.callbacks.LearningRateFinder):  # type: ignore[misc]
    def on_fit_start(self, *given: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


def test_a_finder_within_the_fit_is_refused(tmp_path: Path) -> None:
    """Its steps would be checkpointed as the fit's."""
    with pytest.raises(InputError, match=r"callbacks: Seeking\.on_train_epoch_start trains within the fit"):
        fit(fits.Net(tmp_path), follower(tmp_path, []), Seeking())


class Adding(fits.Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = 1


def test_what_a_hook_would_add_is_told_by_its_name(tmp_path: Path) -> None:
    """Those of Lightning's own callbacks are known."""
    told = list[str]()
    fit(Adding(tmp_path), follower(tmp_path, told), pl.callbacks.EMAWeightAveraging(), pl.callbacks.Timer())
    lines = [line for line in told if "is not called" in line]
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["Adding.on_save_checkpoint is not called"], told


class Beginning(fits.Net):
    def on_train_epoch_start(self) -> None: ...


def test_what_an_epoch_s_beginning_sets_up_is_told_within_it(tmp_path: Path) -> None:
    told = list[str]()
    with pytest.raises(RuntimeError, match="as asked"):
        fit(Beginning(tmp_path), follower(tmp_path, told), fits.Kill("raise", 5))
    assert not any("goes on within an epoch" in line for line in told), told
    fit(Beginning(tmp_path), follower(tmp_path, told), pl.callbacks.TQDMProgressBar(), enable_progress_bar=True)
    assert any("for which Beginning.on_train_epoch_start was not called" in line for line in told), told


def test_a_second_fit_of_a_module_is_told_what_it_undoes(tmp_path: Path) -> None:
    told = list[str]()
    module, callback = fits.Net(tmp_path), follower(tmp_path, told)
    fit(module, callback)
    assert not any("second fit" in line for line in told), told
    fit(module, callback, max_epochs=2)
    assert any("a second fit of the same module resumed iteration 11" in line for line in told), told


def test_a_second_module_is_refused(tmp_path: Path) -> None:
    """It would get the first one's weights, and train nothing."""
    callback = follower(tmp_path, [])
    fit(fits.Net(tmp_path), callback)
    with pytest.raises(InputError, match="has the fit of another module"):
        fit(fits.Net(tmp_path), callback)


def test_a_fit_that_failed_is_tried_again_by_the_same_callback(tmp_path: Path) -> None:
    told = list[str]()
    callback = follower(tmp_path, told)
    with pytest.raises(RuntimeError, match="as asked"):
        fit(fits.Net(tmp_path), callback, fits.Kill("raise", 5))
    fit(fits.Net(tmp_path), callback)
    assert not any("second fit" in line for line in told), told


def weight_of(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.layers[0].weight.detach()
    return weight


class Trained(pl.Callback):  # type: ignore[misc]
    """The weights as the epoch ends."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self.weight = weight_of(pl_module).clone()


@pytest.mark.parametrize("kind", ["averaged", "stochastic"])
def test_the_last_checkpoint_has_the_trained_weights(kind: str, tmp_path: Path) -> None:
    """And not the average, which callbacks before ours put in their place; without more training that stays away."""
    told, noted = list[str](), Trained()
    first, second = fits.Net(tmp_path), fits.Net(tmp_path)
    fit(first, follower(tmp_path, told), *fits.before(kind), noted, max_epochs=3)
    assert not torch.equal(weight_of(first), noted.weight)
    assert not any("nothing was left to train" in line for line in told), told
    fit(second, follower(tmp_path, told), *fits.before(kind), max_epochs=3)
    assert torch.equal(weight_of(second), noted.weight)
    name = type(fits.before(kind)[0]).__name__
    assert any(f"nothing was left to train, and {name}" in line for line in told), told


def test_a_finder_s_file_is_none_of_the_user_s(tmp_path: Path) -> None:
    """But what the user gave is refused beside one, too."""
    finder = fits.before("found")
    fit(fits.Net(tmp_path), follower(tmp_path, []), *finder, default_root_dir=tmp_path)
    module = fits.Net(tmp_path)
    trainer = pl.Trainer(max_epochs=1, logger=False, accelerator="cpu", default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    trainer = pl.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", default_root_dir=tmp_path,
        callbacks=[*finder, follower(tmp_path / "second", [])],
    )  # fmt: skip
    with pytest.raises(InputError, match="ckpt_path is given, and the store is what is resumed"):
        trainer.fit(module, fits.stateful(), ckpt_path=tmp_path / "other.ckpt")
