"""Lightning's Trainer, checkpointed after every optimizer step and resumed to the bit.

    trainer = Trainer(callbacks=[CheckflowCallback("checkpoints")], enable_checkpointing=False)
    trainer.fit(module, loader)                    # resumes what the store has, or begins

An iteration is a global step. It ends where the next begins: what Lightning validates, logs and schedules after a step
belongs to it, so a kill in a validation repeats the step and the validation.

Three methods of Lightning's loop over batches are wrapped while it trains: what they do around a batch has no hook.
Of several processes two more are, that divide a loader's data among them: what these make has no position.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkflow.checkpointing.attach import attach
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.data import ResumableLoader
from checkflow.errors import InputError
from checkflow.integrations._drawn import Generators

try:
    import lightning.pytorch as pl
except ImportError as error:
    try:
        import pytorch_lightning as pl  # the same code under its older name; a Trainer of either takes the callback
    except ImportError:
        raise ImportError(
            f"checkflow.integrations.lightning needs lightning >= 2.6 ({error}); pip install 'checkflow[lightning]'"
        ) from None

__all__ = ["CheckflowCallback"]

_KEY = "lightning"  # of what Trainer keeps, in extra
_OURS = ("scheduler", "scaler")  # Trainer's own
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_WRAPPED = ("on_run_start", "advance", "on_advance_end")  # of the loop over an epoch's batches
_WRAPPER = "DistributedSamplerWrapper"  # of a sampler of the user's, made by the first of these:
_DIVIDING = ("_resolve_sampler", "_prepare_dataloader")  # of what gives each of several processes its data


class CheckflowCallback(pl.Callback):  # type: ignore[misc]
    """Attaches a Trainer's fit to its store, and resumes what that has.

    Args:
        store: directory of the checkpoints.
        options: those of `checkflow.attach`: schedule, interval, persist_every, retention, extra, metadata, start_over,
            ... Schedulers and scaler are Trainer's.
    """

    def __init__(self, store: str | Path, **options: Any) -> None:
        self.store = Path(store)
        for name in set(_OURS) & options.keys():
            raise InputError(f"{name}: is the Trainer's own, and taken along; leave it out")
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._loop: Any = None  # over an epoch's batches
        self._looked = False
        self._steps = 0  # global ones, when the last iteration ended
        self._random: _Random | None = None  # as it was restored, until the first batch
        self._generators: list[torch.Tensor] = []  # states of the loaders' own, likewise
        self._left: dict[str, Any] = {}  # sums of an epoch's logs that were restored, until taken up

    @property
    def checkpointer(self) -> Checkpointer:
        """What `attach` gave, from the beginning of the fit on."""
        if self._checkpointer is None:
            raise InputError(f"{self.store}: is attached when the fit begins; ask for its checkpointer then")
        return self._checkpointer

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        self._loop = trainer.fit_loop.epoch_loop
        wrapped = [getattr(self._loop, name, None) for name in _WRAPPED]
        wrapped += [getattr(trainer._data_connector, name, None) for name in _DIVIDING]
        if not all(map(callable, wrapped)) or not hasattr(self._loop, "_results"):
            raise InputError(f"lightning {pl.__version__}: its loops are others; use 2.6")
        if trainer.ckpt_path is not None:
            raise InputError("fit: ckpt_path is given, and the store is what is resumed; leave it out")
        extra = dict(self._options.get("extra") or {})
        if _KEY in extra:
            raise InputError(f"extra: {_KEY!r} is what the Trainer keeps; take another name")
        self._checkpointer = attach(
            trainer.model,  # as the strategy wraps it: DistributedDataParallel writes buffers before the module runs
            trainer.optimizers,
            store=self.store,
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **(self._options | {"extra": extra | {_KEY: _Progress(self, trainer)}}),
        )
        if self._checkpointer.restore():
            self._random = _Random()
        self._steps = trainer.global_step
        self._wrap(trainer)

    def _wrap(self, trainer: pl.Trainer) -> None:
        began, advance, ended = (getattr(self._loop, name) for name in _WRAPPED)

        def on_run_start(fetcher: Any) -> None:
            for loader in trainer.fit_loop._combined_loader.flattened:
                if isinstance(loader, ResumableLoader):  # Lightning leaves a pass at its last batch, before it ends
                    loader.set_epoch(trainer.current_epoch)
            began(fetcher)
            self._look_at_loaders(trainer)
            self._step(trainer)  # the epoch before has ended, and its successor's order is drawn

        def resumed_advance(fetcher: Any) -> None:
            if self._random is not None and trainer.fit_loop.restarted_mid_epoch:
                self._random.put_back()  # to make the loader's iterator drew once more
                _set(_generators_of(trainer), self._generators)
            self._random = None
            trainer.fit_loop._restarting = self._loop._restarting = False  # all that belongs to the last step was done
            advance(fetcher)
            self._take_up()

        def on_advance_end(fetcher: Any) -> None:
            ended(fetcher)
            if not self._loop._is_training_done:
                self._step(trainer)

        wrappers = (on_run_start, resumed_advance, on_advance_end)
        vars(self._loop).update(dict(zip(_WRAPPED, wrappers, strict=True)))
        divide, prepare = (getattr(trainer._data_connector, name) for name in _DIVIDING)

        def positioned(*given: Any, **named: Any) -> Any:
            sampler = divide(*given, **named)
            return DividedSampler(sampler) if type(sampler).__name__ == _WRAPPER else sampler

        def prepared(*given: Any, **named: Any) -> Any:
            loader = prepare(*given, **named)
            for holder in (loader, getattr(loader, "batch_sampler", None)):
                sampler: Any = getattr(holder, "sampler", None)
                if hasattr(sampler, "set_epoch"):  # which Lightning calls when a resumed order has begun
                    sampler.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
            return loader

        vars(trainer._data_connector).update(dict(zip(_DIVIDING, (positioned, prepared), strict=True)))

    def _look_at_loaders(self, trainer: pl.Trainer) -> None:
        """Once: which have no position."""
        lacking = [one for one in trainer.fit_loop._combined_loader.flattened if not hasattr(one, "state_dict")]
        if lacking and not self._looked:
            self._options.get("notify", warnings.warn)(
                f"{self.store}: a {type(lacking[0]).__name__} does not know its position: after a resume the epoch's "
                "data begin again; use torchdata's StatefulDataLoader or checkflow.ResumableLoader"
            )
        self._looked = True

    def _step(self, trainer: pl.Trainer) -> None:
        """The iteration ended, if there was an optimizer step in it."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.checkpointer.step()

    def _take_up(self) -> None:
        """Sums of the epoch so far, into the metrics of the same names that exist by now."""
        for key in [key for key in self._left if key in self._loop._results]:
            left, metric = self._left.pop(key), self._loop._results[key]
            if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
                metric.value = metric.meta.reduce_fx(left["value"], metric.value)
            else:
                metric.value = left["value"] + metric.value
            if "batches" in left:
                metric.cumulated_batch_size = left["batches"] + metric.cumulated_batch_size

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        self._step(trainer)
        self._unwrap(trainer)
        self.checkpointer.close()  # before Lightning moves the module elsewhere

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        if stage == "fit" and self._checkpointer is not None:  # nothing was left to train
            self._unwrap(trainer)
            self._checkpointer.close()

    def on_exception(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,  # noqa: ARG002
        exception: BaseException,
    ) -> None:
        """What is staged becomes durable."""
        if self._checkpointer is not None:
            self._unwrap(trainer)
            self._checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def _unwrap(self, trainer: pl.Trainer) -> None:
        for name in _WRAPPED:
            vars(self._loop).pop(name, None)
        for name in _DIVIDING:
            vars(trainer._data_connector).pop(name, None)

    def sums(self) -> dict[str, dict[str, Any]]:
        """Of what is logged for the epoch that runs, by the metric's key."""
        return {
            key: {"value": metric.value}
            | ({"batches": metric.cumulated_batch_size} if metric.meta.is_mean_reduction else {})
            for key, metric in self._loop._results.items()
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
        }

    def left(self, sums: dict[str, dict[str, Any]], generators: list[torch.Tensor]) -> None:
        """What was restored of them, and of the loaders' generators."""
        self._left, self._generators = dict(sums), list(generators)


class _Random:
    """The random generators that everybody draws from, as they are when this is made."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _generators_of(trainer: pl.Trainer) -> list[torch.Generator]:
    """Of the training's loaders and their samplers."""
    loader = trainer.fit_loop._combined_loader
    found: dict[int, torch.Generator] = {}
    for one in loader.flattened if loader is not None else ():
        samplers = (getattr(one, "sampler", None), getattr(one, "batch_sampler", None))
        for holder in (one, *samplers, getattr(samplers[1], "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    if len(generators) != len(states):
        raise InputError(
            f"train_dataloader: has {len(generators)} generators, {len(states)} in the checkpoint; use the same loaders"
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class DividedSampler:
    """A sampler of the user's whose order Lightning divides among processes: each draws all of it, and has its part.

    A StatefulDataLoader would skip what it has given of an order that it draws anew; this one draws the same again.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        own = getattr(sampler.dataset._sampler, "generator", None)
        self._rng = Generators("order", {"own": own} if isinstance(own, torch.Generator) else {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> DividedOrder:
        return DividedOrder(self._sampler, self._rng)


class DividedOrder:
    """One order of such a sampler, which knows its position."""

    def __init__(self, sampler: Any, rng: Generators) -> None:
        self._sampler = sampler
        self._rng = rng
        self._begun = rng.read()
        self._indices = iter(sampler)
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._indices)
        self._given += 1
        return index

    def state_dict(self) -> dict[str, object]:
        """What it was drawn with, and how much of it was given."""
        return {"begun": self._begun, "given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Draw it again, and go on there. All generators are left as they were after it was drawn first."""
        self._begun, self._given = state_dict["begun"], state_dict["given"]
        self._rng.set(self._begun)
        self._indices = iter(self._sampler)
        for _ in range(self._given):
            next(self._indices)


class _Progress:
    """What Trainer keeps beside modules, optimizers, schedulers and scaler."""

    def __init__(self, callback: CheckflowCallback, trainer: pl.Trainer) -> None:
        self._callback = callback
        self._trainer = trainer

    def state_dict(self) -> dict[str, object]:
        trainer = self._trainer
        datamodule = trainer.datamodule
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {one.state_key: state for one in self._callbacks() if (state := one.state_dict())},
            "datamodule": datamodule.state_dict() if datamodule is not None else {},
            "metrics": {name: dict(getattr(trainer, name)) for name in _METRICS},
            "sums": self._callback.sums(),
            "generators": [generator.get_state() for generator in _generators_of(trainer)],
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
        self._callback.left(state_dict["sums"], state_dict["generators"])

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callbacks if one is not self._callback]
