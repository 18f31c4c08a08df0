"""What tests of StoreWriter in one process have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import checkflow


def saved(store: Path, state: dict[str, object], **given: object) -> None:
    save(state, storage_writer=checkflow.StoreWriter(store), **given)


def loaded(store: Path, state: dict[str, object], iteration: int | None = None, **given: object) -> dict[str, object]:
    load(state, storage_reader=checkflow.StoreReader(store, iteration), **given)
    return state


def refused(store: Path, state: dict[str, object], **given: object) -> Exception:
    """What torch hands on."""
    with pytest.raises(CheckpointException) as found:
        saved(store, state, **given)
    (error, _), *_ = found.value.failures.values()
    assert isinstance(error, checkflow.CheckflowError)
    assert "\n" not in str(error)
    return error


def checkpoints(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("0*"))
