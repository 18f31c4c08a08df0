"""Lightning's Trainer, checkpointed after every optimizer step and resumed to the bit.

    trainer = Trainer(callbacks=[CheckflowCallback("checkpoints")], enable_checkpointing=False)
    trainer.fit(module, loader)                    # resumes what the store has, or begins

An iteration is a global step. It ends where the next begins: what Lightning validates, logs and schedules after a step
belongs to it, so a kill in a validation repeats the step and the validation.

Three methods of Lightning's loop over batches are wrapped while it trains, and three of its loop over epochs: what they
do around a batch, and around an epoch that goes on, has no hook. So are two that divide a loader's data among several
processes: what these make has no position.
"""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path
from typing import Any

from checkflow.checkpointing.arguments import check_store
from checkflow.checkpointing.attach import attach
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.data import ResumableLoader
from checkflow.errors import InputError
from checkflow.integrations._lightning_data import (
    Ahead,
    DividedSampler,
    GlobalRandom,
    generators_of,
    set_generators,
)
from checkflow.integrations._lightning_state import (
    Progress,
    averaging,
    begin_again,
    count_on,
    modules_of_callbacks,
    not_called,
    refuse_callbacks,
    refuse_path,
)

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
_WRAPPED = ("on_run_start", "advance", "on_advance_end")  # of the loop over an epoch's batches
_AROUND = ("_load_combined_loader_states", "on_advance_start", "on_run_end")  # of the loop over epochs
_SANITY = "_run_sanity_check"  # of Trainer: it drops what was logged last, and what validation has counted
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
        check_store(store)
        self.store = Path(store)
        for name in set(_OURS) & options.keys():
            raise InputError(f"{name}: is the Trainer's own, and taken along; leave it out")
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._loop: Any = None  # over an epoch's batches
        self._looked = False
        self._steps = 0  # global ones, when the last iteration ended
        self._random: GlobalRandom | None = None  # as it was restored, until the first batch
        self._restored: dict[str, Any] = {}  # what Trainer kept, likewise
        self._left: dict[str, Any] = {}  # sums of an epoch's logs that were restored, until taken up
        self._ahead: Ahead  # of the fit that runs
        self._ended: weakref.ref[Any] | None = None  # the module whose fit has

    @property
    def checkpointer(self) -> Checkpointer:
        """What `attach` gave, from the beginning of the fit on."""
        if self._checkpointer is None:
            raise InputError(f"{self.store}: is attached when the fit begins, not by fast_dev_run; ask for it then")
        return self._checkpointer

    def _notify(self, line: str) -> None:
        self._options.get("notify", warnings.warn)(f"{self.store}: {line}")

    def on_load_checkpoint(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,  # noqa: ARG002
        checkpoint: dict[str, Any],  # noqa: ARG002
    ) -> None:
        if trainer.state.fn == "fit":
            refuse_path(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checkpointer, self._random, self._restored, self._left = None, None, {}, {}
        if trainer.fast_dev_run:
            self._notify("fast_dev_run makes no checkpoints, and resumes none")
            return
        self._loop = trainer.fit_loop.epoch_loop
        wrapped = [getattr(self._loop, name, None) for name in _WRAPPED]
        wrapped += [getattr(trainer.fit_loop, name, None) for name in _AROUND]
        wrapped += [getattr(trainer._data_connector, name, None) for name in _DIVIDING]
        wrapped.append(getattr(trainer, _SANITY, None))
        if not all(map(callable, wrapped)) or not hasattr(self._loop, "_results"):
            raise InputError(f"lightning {pl.__version__}: its loops are others; use 2.6")
        refuse_path(trainer)
        refuse_callbacks(trainer)
        if self._ended is not None and self._ended() is not pl_module:
            raise InputError(
                f"{self.store}: has the fit of another module, by this callback; give each module a CheckflowCallback "
                "with a store of its own"
            )
        extra = dict(self._options.get("extra") or {})
        self._ahead = Ahead(trainer.fit_loop)
        ours: dict[str, object] = {_KEY: Progress(self, trainer, self._ahead)}
        ours |= {f"{_KEY}-{name}": module for name, module in modules_of_callbacks(trainer).items()}
        if taken := ours.keys() & extra.keys():
            raise InputError(f"extra: {min(taken)!r} is what the Trainer keeps; take another name")
        for name in not_called(trainer):
            self._notify(
                f"{name} is not called, and what it adds, but for modules that a callback holds, is in no checkpoint; "
                "give it as extra= or metadata="
            )
        self._checkpointer = attach(
            trainer.model,  # as the strategy wraps it: DistributedDataParallel writes buffers before the module runs
            trainer.optimizers,
            store=self.store,
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **(self._options | {"extra": extra | ours}),
        )
        if resumed := self._checkpointer.restore():
            vars(trainer)[_SANITY] = lambda: None  # the fit had it when it began
            self._random = GlobalRandom()
            if self._ended is not None:
                self._notify(
                    f"a second fit of the same module resumed iteration {resumed}: what was changed in memory since "
                    "the first is undone; for another phase of training use a CheckflowCallback with another store"
                )
        self._steps = trainer.global_step
        self._wrap(trainer)
        self._after_finders(trainer, resumed)

    def _after_finders(self, trainer: pl.Trainer, resumed: int) -> None:
        """Those of Lightning train before this is called, and leave loaders that are set up."""
        loop = trainer.fit_loop
        if loop._combined_loader is None:
            return
        if resumed or trainer.world_size > 1:  # they have to be set up again, as what was restored is loaded then
            if loop._data_fetcher is not None:
                loop._data_fetcher.teardown()
            loop._combined_loader = None
        else:
            self._ahead.follow(loop._combined_loader)

    def _wrap(self, trainer: pl.Trainer) -> None:
        self._wrap_batches(trainer)
        self._wrap_epochs(trainer.fit_loop)
        self._wrap_divided(trainer)

    def _wrap_epochs(self, loop: Any) -> None:
        load, start, end = (getattr(loop, name) for name in _AROUND)

        def loaded() -> None:
            waiting = bool(loop._combined_loader_states_to_load)
            load()
            self._ahead.follow(loop._combined_loader)
            if waiting and not loop._combined_loader_states_to_load:
                self._ahead.resume(self._restored.get("ahead", ""))

        def on_advance_start() -> None:
            start()
            if loop.restarted_mid_epoch and (names := begin_again(loop.trainer)):
                self._notify(
                    f"goes on within an epoch, for which {' and '.join(names)} was not called: what that sets up has "
                    "to be state (a buffer, state_dict), or to be made from trainer.current_epoch where it is used"
                )

        def on_run_end() -> None:
            self._end(loop.trainer)  # before callbacks put averaged weights in place of the trained ones
            end()

        vars(loop).update(dict(zip(_AROUND, (loaded, on_advance_start, on_run_end), strict=True)))

    def _wrap_batches(self, trainer: pl.Trainer) -> None:
        began, advance, ended = (getattr(self._loop, name) for name in _WRAPPED)

        def on_run_start(fetcher: Any) -> None:
            for loader in trainer.fit_loop._combined_loader.flattened:
                if isinstance(loader, ResumableLoader) and not trainer.fit_loop.restarted_mid_epoch:
                    loader.set_epoch(trainer.current_epoch)  # Lightning leaves a pass at its last batch, before it ends
            began(fetcher)
            self._look_at_loaders(trainer)
            self._step(trainer)  # the epoch before has ended, and its successor's order is drawn

        def resumed_advance(fetcher: Any) -> None:
            if self._random is not None and trainer.fit_loop.restarted_mid_epoch:
                self._random.put_back()  # to make the loader's iterator drew once more
                set_generators(generators_of(trainer.fit_loop._combined_loader), self._restored["generators"])
                counted = self._restored.get("counted", {})
                count_on(trainer.lightning_module, counted)  # which on_train_start may have reset
            self._random, self._restored = None, {}
            trainer.fit_loop._restarting = self._loop._restarting = False  # all that belongs to the last step was done
            advance(fetcher)
            self._take_up()

        def on_advance_end(fetcher: Any) -> None:
            ended(fetcher)
            if not self._loop.done:  # with its last batch goes the end of the epoch
                self._step(trainer)

        wrappers = (on_run_start, resumed_advance, on_advance_end)
        vars(self._loop).update(dict(zip(_WRAPPED, wrappers, strict=True)))

    def _wrap_divided(self, trainer: pl.Trainer) -> None:
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
            self._notify(
                f"a {type(lacking[0]).__name__} does not know its position: after a resume the epoch's "
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

    def _end(self, trainer: pl.Trainer) -> None:
        self._step(trainer)
        self._close(trainer)
        self._ended = weakref.ref(trainer.lightning_module)

    def _close(self, trainer: pl.Trainer) -> None:
        """Before Lightning moves the module elsewhere."""
        self._unwrap(trainer)
        self.checkpointer.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        if stage == "fit" and self._checkpointer is not None and _AROUND[0] in vars(trainer.fit_loop):
            self._close(trainer)
            if self._random is not None:
                self._random.put_back()  # to make the loaders' iterators drew
            for name in averaging(trainer):
                self._notify(
                    f"nothing was left to train, and {name}.on_train_end is not called then: the module has its "
                    "trained weights, not the average"
                )

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
        for name in _AROUND:
            vars(trainer.fit_loop).pop(name, None)
        for name in _DIVIDING:
            vars(trainer._data_connector).pop(name, None)
        vars(trainer).pop(_SANITY, None)
        self._ahead.release()

    def sums(self) -> dict[str, dict[str, Any]]:
        """Of what is logged for the epoch that runs, by the metric's key."""
        return {
            key: {"value": metric.value}
            | ({"batches": metric.cumulated_batch_size} if metric.meta.is_mean_reduction else {})
            for key, metric in self._loop._results.items()
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
        }

    def left(self, state: dict[str, Any]) -> None:
        """What was restored of all that Trainer keeps."""
        self._restored, self._left = state, dict(state["sums"])
