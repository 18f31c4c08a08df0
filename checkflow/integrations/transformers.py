"""Hugging Face's Trainer, checkpointed after every optimizer step and resumed to the bit.

    trainer = resumable(Trainer)(model, args, train_dataset=data, callbacks=[CheckflowCallback("checkpoints")])
    trainer.train(resume_from_checkpoint=True)

An iteration is a global step. It ends where the next begins: what Trainer logs, evaluates and saves after a step
belongs to it, so a kill in an evaluation repeats the step and the evaluation.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from checkflow.checkpointing import voices
from checkflow.checkpointing.arguments import check_store, deadline_of
from checkflow.checkpointing.attach import attach
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.checkpointing.foreseen import foreseen
from checkflow.distributed.group import DEADLINE_S
from checkflow.distributed.parts import directories_in
from checkflow.errors import InputError
from checkflow.integrations._trainer_data import Evaluations, Passes
from checkflow.state.host.decode import decode
from checkflow.state.host.record import parse_record
from checkflow.store.format.manifest import RECORD
from checkflow.store.format.reader import read_file

try:
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        f"checkflow.integrations.transformers needs transformers and accelerate ({error}); "
        "pip install 'checkflow[transformers]'"
    ) from None

if not hasattr(Trainer, "_finalize_training"):
    raise ImportError(
        f"checkflow.integrations.transformers needs transformers >= 5.5, this is {version('transformers')}; "
        "pip install 'checkflow[transformers]'"
    )

__all__ = ["CheckflowCallback", "resumable", "to_folder"]

_KEY = "trainer"  # of what Trainer keeps, in metadata and extra
_NUMBERS = ("current_flos", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
_REFUSED = ("metadata", "scheduler", "scaler")  # Trainer's own, or read here
_ADVICE = "train(resume_from_checkpoint=True) resumes it, CheckflowCallback(..., start_over=True) begins anew beside it"


class _Exported(Exception):
    """The folder is written: there is nothing to train."""


class CheckflowCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches a Trainer's training to its store. Only for a `resumable` Trainer.

    Args:
        store: directory of the checkpoints.
        options: those of `checkflow.attach`: schedule, interval, persist_every, retention, extra, start_over, ...
            `metadata` has to be a mapping. Scheduler and scaler are Trainer's.
    """

    def __init__(self, store: str | Path, **options: Any) -> None:
        check_store(store)
        self.store = Path(store)
        for name in set(_REFUSED[1:]) & options.keys():
            raise InputError(f"{name}: is the Trainer's own, and taken along; leave it out")
        self._options = options
        self._trainer: Any = None
        self._checkpointer: Checkpointer | None = None
        self._ended = False  # an iteration did, and what belongs to it may still come
        self._asked = False  # for what the store has
        self._folder: Path | None = None  # what Trainer resumes from, where it is ours
        self._iteration = 0  # of the checkpoint that is resumed
        self._only_export = False
        self.passes, self.evaluations = Passes(None), Evaluations(None)
        self._began_s = 0.0  # of the monotonic clock; before the process, by the time that earlier ones trained

    @property
    def checkpointer(self) -> Checkpointer:
        """What `attach` gave, from the beginning of the training on."""
        if self._checkpointer is None:
            raise InputError(f"{self.store}: is attached when training begins; ask for its checkpointer then")
        return self._checkpointer

    def prepare(self, trainer: Any, *, only_export: bool) -> None:
        """A training begins. It resumes from nothing of ours, unless `find` finds something."""
        if trainer.args.auto_find_batch_size:
            raise InputError("auto_find_batch_size: begins a training anew within itself; give its batch size")
        if trainer.is_deepspeed_enabled:
            raise InputError("deepspeed: keeps weights and optimizer to itself; use DistributedDataParallel or FSDP2")
        self._trainer, self._folder, self._checkpointer, self._only_export = trainer, None, None, only_export
        self._asked = False
        self.passes, self.evaluations = Passes(None), Evaluations(None)

    def find(self, folder: Path) -> str | None:
        """The newest checkpoint that verifies, as a folder with what Trainer reads before it has an optimizer."""
        options = self._options
        hearers = voices.Hearers(options.get("notify", voices.warn), options.get("tell", voices.to_stderr))
        deadline_s = deadline_of(options.get("peers_deadline_s", DEADLINE_S))
        bucket = None if options.get("start_over") else options.get("bucket")
        found = foreseen(self.store, deadline_s, hearers, bucket)
        self._asked = True
        if found is None or options.get("start_over"):
            if self._only_export:
                raise InputError(f"{self.store}: has no checkpoint to export; give the store of a training")
            return None
        metadata = decode(parse_record(bytes(read_file(found, RECORD))).metadata, "metadata")
        if not isinstance(metadata, dict) or not isinstance(metadata.get(_KEY), dict):
            raise InputError(f"{self.store}: its checkpoints are of no Trainer; give another store")
        self._iteration, self._folder = found.iteration, folder
        data = metadata[_KEY].get("data", {})  # none in older stores
        self.passes, self.evaluations = Passes(data.get("train")), Evaluations(data.get("evaluate"))
        TrainerState(**metadata[_KEY]["state"]).save_to_json(str(folder / "trainer_state.json"))
        return str(folder)

    @property
    def resumes(self) -> bool:
        """Whether Trainer reads the folder that `find` made: weights and optimizer are restored by checkflow then."""
        return self._folder is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        if self._trainer is None:
            raise InputError("CheckflowCallback: this Trainer cannot resume; make it with resumable(Trainer)(...)")
        begins_anew = bool(self._options.get("start_over"))
        if not (self._asked or begins_anew) and directories_in(self.store, but=0):
            raise InputError(f"{self.store}: holds checkpoints of an earlier training; {_ADVICE}")
        self.passes.follow(given["train_dataloader"], args.world_size)
        user = self._options.get("metadata") or {}
        extra = {**(self._options.get("extra") or {}), _KEY: _Loss(self._trainer)}
        options = self._options | {"metadata": _Live(self, user), "extra": extra}
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        self._began_s, self._ended = time.monotonic(), False
        self._checkpointer = attach(
            self._trainer.model_wrapped,  # DistributedDataParallel writes buffers before the model runs
            given["optimizer"],
            store=self.store,
            scheduler=given["lr_scheduler"],
            scaler=scaler,
            **options,
        )
        if self._folder is None:
            if self._asked:  # some ranks may have parts of what no rank has whole
                self._checkpointer.restore()
            return
        self._checkpointer.restore(self._iteration)
        kept = cast(dict[str, Any], self._checkpointer.metadata[_KEY])
        for name, value in kept["numbers"].items():
            setattr(self._trainer, name, value)
        self._began_s -= kept["seconds"]
        self._trainer._save_rng_state(str(self._folder))  # Trainer loads it once the batches are skipped
        if self._only_export:
            self._trainer._save_checkpoint(self._trainer.model, trial=None)
            raise _Exported

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        self._ended = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        self._step()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        self.passes.begin(state.global_step)
        self._step()

    def _step(self) -> None:
        if self._ended:
            self._ended = False
            self.checkpointer.step()

    def complete(self) -> float:
        """The last iteration ended: make it durable. Returns the seconds that all processes trained."""
        self._step()
        seconds = time.monotonic() - self._began_s
        self.checkpointer.close()
        return seconds

    def abandon(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Training raised: what is staged becomes durable."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(kind, error, traceback)

    def progress(self) -> dict[str, object]:
        """What Trainer keeps beside its tensors, as JSON."""
        trainer = self._trainer
        callbacks = [one for one in (*trainer.callback_handler.callbacks, trainer.control) if _has_state(one)]
        stateful = TrainerState(stateful_callbacks=callbacks).stateful_callbacks
        state = vars(trainer.state) | {"stateful_callbacks": stateful}
        numbers = {name: getattr(trainer, name) for name in _NUMBERS if hasattr(trainer, name)}
        evaluated = self.evaluations.state(getattr(trainer, "_eval_dataloaders", {}))
        data = {"train": self.passes.state(trainer.state.global_step), "evaluate": evaluated}
        return {"state": state, "numbers": numbers, "data": data, "seconds": time.monotonic() - self._began_s}


class _Live(Mapping[str, object]):
    """The user's metadata and Trainer's, as they are when asked for."""

    def __init__(self, callback: CheckflowCallback, user: Mapping[str, object]) -> None:
        if _KEY in user:
            raise InputError(f"metadata: {_KEY!r} is what Trainer keeps; take another name")
        self._callback = callback
        self._user = user

    def __getitem__(self, key: str) -> object:
        return self._callback.progress() if key == _KEY else self._user[key]

    def __iter__(self) -> Iterator[str]:
        yield _KEY
        yield from self._user

    def __len__(self) -> int:
        return 1 + len(self._user)


class _Loss:
    """The loss since it was last logged, which stays on its device."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, object]:
        return {"loss": self._trainer._tr_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer._tr_loss.copy_(state_dict["loss"])


def _callback_of(trainer: Any) -> CheckflowCallback | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, CheckflowCallback)), None)


def _has_state(callback: object) -> bool:
    return isinstance(callback, ExportableState)


class _Resumable:
    """Of a Trainer: where it reads a checkpoint, and where training ends. `super()` is that Trainer."""

    _only_export = False

    @property
    def _checkflow(self: Any) -> CheckflowCallback:
        if (callback := _callback_of(self)) is not None:
            return callback
        raise InputError("resumable Trainer: has no store; give callbacks=[CheckflowCallback('checkpoints')]")

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *given: Any, **named: Any) -> Any:
        """As Trainer's. True takes the newest checkpoint of the store that verifies, or begins where it has none.

        Where one is taken, `eval_on_start` has been done by the run that began.
        """
        callback = self._checkflow
        with tempfile.TemporaryDirectory(prefix="checkflow-", ignore_cleanup_errors=True) as folder:
            callback.prepare(self, only_export=self._only_export)
            if resume_from_checkpoint is True:
                resume_from_checkpoint = callback.find(Path(folder))
            evaluates = self.args.eval_on_start
            self.args.eval_on_start = evaluates and not callback.resumes
            try:
                return super().train(resume_from_checkpoint, *given, **named)  # type: ignore[misc]
            except BaseException:
                callback.abandon(*sys.exc_info())
                raise
            finally:
                self.args.eval_on_start = evaluates

    def get_eval_dataloader(self: Any, eval_dataset: Any = None) -> Any:
        callback = _callback_of(self)
        make = partial(super().get_eval_dataloader, eval_dataset)  # type: ignore[misc]
        if callback is None:
            return make()
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"  # as Trainer keeps it
        return callback.evaluations.get(name, getattr(self, "_eval_dataloaders", {}), make)

    def _init_training_state(self: Any, max_steps: int, steps_of_pass: int, passes: int, *given: Any) -> Any:
        """The passes that are done, and the batches of the next."""
        reckoned = super()._init_training_state(max_steps, steps_of_pass, passes, *given)  # type: ignore[misc]
        callback = self._checkflow
        if callback.resumes and self.state.global_step >= max_steps:
            return passes, 0  # all is done
        sized = steps_of_pass if passes != sys.maxsize else None  # which it is where the data has no length
        args = self.args
        return callback.passes.position(
            reckoned, sized, args.gradient_accumulation_steps, skips=not args.ignore_data_skip
        )

    def _load_from_checkpoint(self: Any, *given: Any) -> None:
        if not self._checkflow.resumes:
            super()._load_from_checkpoint(*given)  # type: ignore[misc]

    def _load_callback_state(self: Any) -> None:
        """In place: the object that the user holds stays the one that is called."""
        if not self._checkflow.resumes:
            super()._load_callback_state()  # type: ignore[misc]
            return
        kept = self.state.stateful_callbacks
        left = {name: states if isinstance(states, list) else [states] for name, states in kept.items()}
        for callback in filter(_has_state, self.callback_handler.callbacks):
            states = left.get(type(callback).__name__)
            for name, value in (states.pop(0)["attributes"] if states else {}).items():
                setattr(callback, name, value)

    def _finalize_training(self: Any, trial: Any, num_train_samples: int, start_time: float) -> Any:  # noqa: ARG002
        """The last iteration has ended: the best model, which Trainer may load now, is no part of it."""
        began = time.time() - self._checkflow.complete()  # of all processes that trained, as the steps are
        return super()._finalize_training(trial, num_train_samples, began)  # type: ignore[misc]


def resumable(trainer: type[Trainer]) -> type[Trainer]:
    """The class, with a `train` that resumes from the store of its CheckflowCallback. A subclass of Trainer will do."""
    return type(f"Resumable{trainer.__name__}", (_Resumable, trainer), {})


def to_folder(trainer: Any) -> Path:
    """Write the newest checkpoint that verifies as Trainer does, into `checkpoint-<step>` of its output_dir.

    The trainer is a `resumable` one that has not trained; it is used up by this. Returns the folder.
    """
    trainer._only_export = True
    try:
        trainer.train(resume_from_checkpoint=True)
    except _Exported:
        return Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    raise AssertionError("training begins with the export")
