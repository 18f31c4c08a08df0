"""What the three uses of torch.distributed.checkpoint share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import checkflow
from contenders import Contender, Tier
from contenders._state import first_that_loads, newest_first, optimizer_of, rng_state, set_rng_state, sync

THREADS = 2  # of the writer; measured here the fastest of 1, 2 and 4


def state_of(training: checkflow.Training, iteration: int) -> dict[str, object]:
    """As its tutorial does: state dicts with the same names on any number of processes."""
    model, optimizer = get_state_dict(training.models[0], optimizer_of(training))
    return {"model": model, "optimizer": optimizer, "rng": rng_state(), "iteration": iteration}


def writer(path: Path, tier: Tier) -> FileSystemWriter:
    return FileSystemWriter(path, sync_files=tier is Tier.DISK, thread_count=THREADS)


def published(path: Path, tier: Tier) -> None:
    """It syncs its files and not the directories that name them."""
    if tier is Tier.DISK:
        sync(path)
        sync(path.parent)


class DCP(Contender):
    durable = True

    def restore(self) -> int:
        whole = [path for path in newest_first(self.job.folder) if (path / ".metadata").exists()]
        return first_that_loads(whole, self._load)

    def _load(self, path: Path) -> int:
        state = state_of(self.training, 0)
        load(state, checkpoint_id=path, no_dist=True)
        model, optimizer, rng, iteration = (state[key] for key in ("model", "optimizer", "rng", "iteration"))
        assert isinstance(model, dict) and isinstance(optimizer, dict) and isinstance(rng, dict)
        assert isinstance(iteration, int)
        set_state_dict(
            self.training.models[0],
            optimizer_of(self.training),
            model_state_dict=model,
            optim_state_dict=optimizer,
        )
        set_rng_state({name: torch.as_tensor(value) for name, value in rng.items()})
        return iteration
