"""torchtitan's trainer, checkpointed after every step.

    config.checkpoint = CheckflowManager.Config(enable=True, interval=10)      # in place of CheckpointManager.Config

Each step is checkpointed in host memory; `interval` is how many of them lie between two that are made durable, and
`keep_latest_k` of those are retained.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkflow.checkpointing.attach import attach
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.errors import InputError
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.persist_every import PersistEvery

try:
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
except ImportError as error:
    raise ImportError(
        f"checkflow.integrations.torchtitan needs torchtitan >= 0.3 ({error}); pip install 'checkflow[torchtitan]'"
    ) from None

__all__ = ["CheckflowManager"]

_KEEP_ALL = 2**31
_NOT_OURS = {
    "initial_load_path": "load those weights before training, with torchtitan's CheckpointManager",
    "exclude_from_loading": "all of a checkpoint is restored, or none; leave it out",
    "create_seed_checkpoint": "torchtitan's CheckpointManager makes one",
    "load_only": "a training that saves nothing needs no manager; restore with torchtitan's CheckpointManager",
}


class CheckflowManager(BaseCheckpointManager):  # type: ignore[misc]
    """Attaches when the trainer loads, learns its schedule, and steps where the trainer saves; on each rank.

    Raises InputError for what torchtitan's own managers do and this one does not.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's, and what `checkflow.attach` is given beside it."""

        schedule: str = ""
        """Path of a compiled schedule; learned from the training without one."""

        slots: int = 3
        """Checkpoints that host memory holds."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: object = None,  # noqa: ARG002 (of formats that are exported)
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        for field, advice in _NOT_OURS.items():
            if getattr(config, field):
                raise InputError(f"checkpoint.{field}: checkflow does not do that; {advice}")
        self._store = Path(base_folder, config.folder)
        self._checkpointer: Checkpointer | None = None
        self._attach = partial(
            attach,
            model_parts,
            list(optimizers),
            store=self._store,
            schedule=config.schedule or None,
            scheduler=lr_schedulers,
            loader=dataloader,
            extra=states,
            slots=config.slots,
            persist_every=PersistEvery(iterations=config.interval),
            retention=Retention(last=config.keep_latest_k or _KEEP_ALL),
        )

    @property
    def checkpointer(self) -> Checkpointer:
        """What `attach` gave, from the trainer's `load` on."""
        if self._checkpointer is None:
            raise InputError(f"{self._store}: is attached when the trainer loads; call load() first")
        return self._checkpointer

    def _load(self, step: int = -1) -> bool:
        """Attach, and restore the newest checkpoint that verifies, or that of a step. False where there is none."""
        self._checkpointer = self._attach()
        return self._checkpointer.restore(None if step == -1 else step) > 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: ARG002 (an export is a command of its own)
        """Step `curr_step` ended. Returns whether it has a checkpoint in host memory or is about to."""
        self.checkpointer.step()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Guards of the update wait for what they must."""

    def _wait_for_saving(self) -> None:
        """No save is a future."""

    def _close(self) -> None:
        """The last completed step becomes durable."""
        if self._checkpointer is not None:
            self._checkpointer.close()
