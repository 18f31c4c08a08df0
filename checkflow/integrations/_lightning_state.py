"""What Lightning's Trainer, its callbacks and its module keep beside parameters and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from checkflow.errors import InputError
from checkflow.integrations._lightning_data import Ahead, generators_of

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_SAVING = ("on_save_checkpoint", "on_load_checkpoint")
_THEIRS = ("lightning", "pytorch_lightning")  # packages whose own hooks are known
_AGAIN = ("GradientAccumulationScheduler", "StochasticWeightAveraging")  # set Trainer up where an epoch begins
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
_FINDERS = (".lr_find_", ".scale_batch_size_")  # how the files begin that they write, and restore


def is_a(one: object, name: str) -> bool:
    """By its name: two packages have the class."""
    return any(kind.__name__ == name for kind in type(one).__mro__)


def _owner(one: object, hook: str) -> str:
    """The package, and the class, that defines a hook of it; nothing where the object has one of its own."""
    if hook in vars(one):
        return ""
    return next((f"{kind.__module__}.{kind.__name__}" for kind in type(one).__mro__ if hook in vars(kind)), "")


def overridden(one: object, *hooks: str) -> str:
    """Name of the first of these that is the user's own; empty where all are Lightning's."""
    named = (hook for hook in hooks if hasattr(one, hook) and _owner(one, hook).partition(".")[0] not in _THEIRS)
    return next((f"{type(one).__name__}.{hook}" for hook in named), "")


def refuse_path(trainer: Any) -> None:
    """Raises InputError where fit was given a checkpoint; a finder's own file is none."""
    path = trainer.ckpt_path
    if path is not None and not str(path).replace("\\", "/").rpartition("/")[2].startswith(_FINDERS):
        raise InputError("fit: ckpt_path is given, and the store is what is resumed; leave it out")


def refuse_callbacks(trainer: Any) -> None:
    """Raises InputError for one that gives optimizers other groups as training goes, or trains by itself."""
    for one in trainer.callbacks:
        if is_a(one, "BaseFinetuning"):
            raise InputError(
                f"callbacks: {type(one).__name__} adds parameter groups while training, and after that no checkpoint "
                "could be resumed; give the optimizer all groups from the start, and freeze by requires_grad"
            )
        finds = is_a(one, "LearningRateFinder") or is_a(one, "BatchSizeFinder")
        if finds and (name := overridden(one, "on_train_start", "on_train_epoch_start", "on_train_batch_start")):
            raise InputError(f"callbacks: {name} trains within the fit; look for what it finds before")


def modules_of_callbacks(trainer: Any) -> dict[str, torch.nn.Module]:
    """By a name for each: those that callbacks give to Lightning's checkpoints, averaged weights."""
    known = {id(module) for module in trainer.lightning_module.modules()}
    found = [
        held
        for one in trainer.callbacks
        if _owner(one, _SAVING[0]).rpartition(".")[2] != "Callback"
        for held in vars(one).values()
        if isinstance(held, torch.nn.Module) and id(held) not in known and held.state_dict()
    ]
    return {f"held-{number}": module for number, module in enumerate(found)}


def averaging(trainer: Any) -> list[str]:
    """Names of the callbacks that give the module averaged weights when training ends."""
    return [type(one).__name__ for one in trainer.callbacks if any(is_a(one, name) for name in _AVERAGING)]


def not_called(trainer: Any) -> Iterator[str]:
    """Hooks of the user's that would add to Lightning's checkpoints."""
    callbacks = (one for one in trainer.callbacks if not is_a(one, "CheckflowCallback"))
    for one in (*callbacks, trainer.datamodule, trainer.lightning_module):
        if name := overridden(one, *_SAVING):
            yield name


def begin_again(trainer: Any) -> list[str]:
    """Within an epoch: what sets Trainer up at its beginning does so again. Gives the names of those that do not."""
    names = []
    for one in (*trainer.callbacks, trainer.lightning_module):
        if any(is_a(one, name) for name in _AGAIN):
            groups = [[dict(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
            one.on_train_epoch_start(trainer, trainer.lightning_module)
            for optimizer, restored in zip(trainer.optimizers, groups, strict=True):
                for group, values in zip(optimizer.param_groups, restored, strict=True):
                    group.update(values)  # to make a schedule takes a step of it
        elif name := overridden(one, "on_train_epoch_start"):
            names.append(name)
    return names


def counted(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What the torchmetrics of a module have counted so far, by their names in it."""
    counting = ((name, one) for name, one in module.named_modules() if _is_metric(one) and one._update_count)
    return {
        name: {"updates": one._update_count, "state": {key: _copied(getattr(one, key)) for key in one._defaults}}
        for name, one in counting
    }


def count_on(module: torch.nn.Module, states: dict[str, dict[str, Any]]) -> None:
    """The metrics of these names go on from there."""
    for name, metric in module.named_modules():
        if _is_metric(metric) and name in states:
            for key, value in states[name]["state"].items():
                setattr(metric, key, _copied(value, metric.device))
            metric._update_count, metric._computed = states[name]["updates"], None


def _is_metric(module: Any) -> bool:
    return is_a(module, "Metric") and hasattr(module, "_defaults") and hasattr(module, "_update_count")


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A metric changes its tensors in place; to a list it adds."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if device is None else value.to(device, copy=True)
    return [each if device is None else each.to(device) for each in value]


class Progress:
    """What Trainer keeps beside modules, optimizers, schedulers and scaler."""

    def __init__(self, callback: Any, trainer: Any, ahead: Ahead) -> None:
        self._callback = callback
        self._trainer = trainer
        self._ahead = ahead

    def state_dict(self) -> dict[str, object]:
        trainer = self._trainer
        datamodule, loader = trainer.datamodule, trainer.fit_loop._combined_loader
        loops = trainer.fit_loop.state_dict()
        return {
            "ahead": self._ahead.of_given(loops),
            "loops": loops,
            "callbacks": {one.state_key: state for one in self._callbacks() if (state := one.state_dict())},
            "datamodule": datamodule.state_dict() if datamodule is not None else {},
            "metrics": {name: dict(getattr(trainer, name)) for name in _METRICS},
            "sums": self._callback.sums(),
            "counted": counted(trainer.lightning_module),
            "generators": [one.get_state() for one in generators_of(loader)],
            "should_stop": trainer.should_stop,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state_dict["loops"])
        for one in self._callbacks():
            if one.state_key in state_dict["callbacks"]:
                one.load_state_dict(state_dict["callbacks"][one.state_key])
        if trainer.datamodule is not None and state_dict["datamodule"]:
            trainer.datamodule.load_state_dict(state_dict["datamodule"])
        for name in _METRICS:
            getattr(trainer, name).update(state_dict["metrics"][name])
        trainer.should_stop = state_dict["should_stop"]
        count_on(trainer.lightning_module, state_dict.get("counted", {}))  # older stores have none
        self._callback.left(state_dict)

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callbacks if one is not self._callback]
