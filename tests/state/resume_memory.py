"""A checkpoint in memory, in the store's layout: what restore is given, with no store or runtime involved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkflow.dtypes import CODES
from checkflow.state.host.capture import HostState
from checkflow.state.host.objects import HostObjects
from checkflow.state.live import Live, live_state
from checkflow.state.names import file_of
from checkflow.state.restore import Restored, restore
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.training import Training


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint's bytes: files by name, and the record."""

    files: dict[str, memoryview]
    record: bytes


def stored_lives(training: Training) -> list[Live]:
    """The state that files hold; the rest is the record's."""
    return [live for live in live_state(training) if not live.is_host_scalar]


def host_state(training: Training, objects: HostObjects) -> HostState:
    """The reader of the host's half, with files as they would be for the state as it is now or will be."""
    return HostState(
        training,
        objects,
        stored=lambda name: name in {live.name for live in stored_lives(training)},
        fingerprints={"schedule": "sha256:0"},
    )


def save(training: Training, objects: HostObjects, iteration: int) -> Saved:
    """The training's state now."""
    specs: dict[str, list[TensorSpec]] = {}
    aliases: dict[str, list[tuple[str, str]]] = {}
    first: dict[tuple[str, int, tuple[int, ...]], str] = {}
    kept: dict[tuple[str, str], torch.Tensor] = {}
    for live in stored_lives(training):
        prefix, _, name = live.name.partition("/")
        tensor = live.tensor
        rep = first.setdefault((prefix, tensor.data_ptr() if tensor.numel() else id(live), tuple(tensor.shape)), name)
        if rep == name:
            specs.setdefault(prefix, []).append(
                TensorSpec(name, CODES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
            )
            kept[file_of(prefix), name] = tensor
        else:
            aliases.setdefault(prefix, []).append((name, rep))
    layout = Layout.of(
        tuple(FileSpec(file_of(p), tuple(found), tuple(aliases.get(p, ()))) for p, found in specs.items())
    )
    slot = memoryview(bytearray(layout.size_bytes))
    files: dict[str, memoryview] = {}
    for file in layout.files:
        slot[file.offset_bytes : file.offset_bytes + len(file.header)] = file.header
        for place in file.tensors:
            data = kept[file.name, place.spec.name].detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
            slot[place.offset_bytes : place.end_bytes] = data
        files[file.name] = slot[file.offset_bytes : file.offset_bytes + file.size_bytes]
    return Saved(files, host_state(training, objects).capture(iteration).record())


def load(saved: Saved, training: Training, objects: HostObjects) -> Restored:
    """Restore it."""
    return restore(saved.files, saved.record, training, objects)
