"""torch_checkpointing: staged by a thread into shared memory, written by a process of its own.

Its tutorial's loop. It syncs nothing by itself; on disk its two hooks, which run in the writing process, do.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import checkflow
from contenders import Contender, Job, Tier
from contenders._state import (
    first_that_loads,
    newest_first,
    not_installed,
    optimizer_of,
    place,
    prune,
    set_rng_state,
    state_of,
    sync,
)

if TYPE_CHECKING:
    from torch_checkpointing.checkpoint_writer import CallbackArgs


def sync_files(args: CallbackArgs) -> None:
    folder = Path(args.path)
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync_name(args: CallbackArgs) -> None:
    sync(Path(args.path).parent)


class TorchCheckpointing(Contender):
    what = "CheckpointManager.save, lock() around the update, use_direct_io=False, synced in its hooks"
    durable = True

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        super().__init__(job, training)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        disk = job.tier is Tier.DISK
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                pre_finalize_callback=sync_files if disk else None,
                finalize_callback=sync_name if disk else None,
            )
        )
        self._lock = self._manager.lock()
        self._locked = False
        self._write: object = None

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("torch_checkpointing")

    @classmethod
    def preload(cls) -> None:
        import torch_checkpointing.storage.filesystem  # noqa: F401

    @classmethod
    def version(cls) -> str:
        return f"torch_checkpointing {version('torch_checkpointing')}"

    def before_update(self) -> None:
        self._lock.__enter__()
        self._locked = True

    def after_update(self) -> None:
        if self._locked:
            self._locked = False
            self._lock.__exit__(None, None, None)

    def after_iteration(self, iteration: int) -> None:
        if self.job.due(iteration):
            # It waits for the last one by itself, so that one is complete when this returns.
            self._write = self._manager.save(str(place(self.job.folder, iteration)), state_of(self.training, iteration))
            prune(self.job.folder)

    def wait(self) -> None:
        write, self._write = self._write, None
        if write is not None:
            write.result()  # type: ignore[attr-defined]
            prune(self.job.folder)

    def close(self) -> None:
        self._manager.close()

    def restore(self) -> int:
        return first_that_loads(newest_first(self.job.folder), self._load)

    def _load(self, path: Path) -> int:
        into = {"model": self.training.models[0].state_dict(), "optimizer": None, "rng": None, "iteration": 0}
        found = self._manager.load(str(path), into=into)
        optimizer_of(self.training).load_state_dict(found["optimizer"])
        set_rng_state({name: torch.as_tensor(value) for name, value in found["rng"].items()})
        return int(found["iteration"])
