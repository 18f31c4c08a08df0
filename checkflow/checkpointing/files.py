"""Which safetensors files a training's state goes to, and under which names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from checkflow.dtypes import CODES
from checkflow.lanes import lane_file
from checkflow.runtime.binding import Binding, Target
from checkflow.state import refused
from checkflow.state.memory import as_bytes
from checkflow.state.names import StateName, file_of
from checkflow.state.restore.files import DTYPES, FileTensor, TensorFile
from checkflow.state.restore.lanes import gathered
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec


def layouts_of(binding: Binding, lanes: int) -> tuple[Layout, ...]:
    """The files of a training's checkpoint: one for each model and each optimizer that has tensors; of each lane."""
    return tuple(_layout_of(binding, lane) for lane in range(lanes))


def _layout_of(binding: Binding, lane: int) -> Layout:
    tensors: dict[str, list[TensorSpec]] = {}
    aliases: dict[str, list[tuple[str, str]]] = {}
    for target in targets_in(binding, lane):
        file, name = file_and_tensor(target.name)
        tensors.setdefault(file, [])
        if target.alias_of is not None:
            aliases.setdefault(file, []).append((name, file_and_tensor(target.alias_of)[1]))
        else:
            tensors[file].append(_spec(name, target))
    return Layout.of(tuple(FileSpec(f, tuple(found), tuple(aliases.get(f, ()))) for f, found in tensors.items()))


def targets_in(binding: Binding, lane: int) -> list[Target]:
    """What slots of a lane have."""
    return [target for name, target in binding.targets.items() if binding.lanes.get(name, lane) == lane]


def _spec(name: str, target: Target) -> TensorSpec:
    refused.check_dtype(target.name, target.dtype)
    logical = target.order == tuple(range(len(target.shape)))
    return TensorSpec(name, CODES[target.dtype], target.shape, None if logical else target.order)


def without_bytes(layouts: Sequence[Layout]) -> dict[str, TensorFile]:
    """The files as they will be read, to be matched with a training."""
    if len(layouts) > 1:
        named = {
            lane_file(lane, name): file
            for lane, layout in enumerate(layouts)
            for name, file in without_bytes([layout]).items()
        }
        return gathered(range(len(layouts)), named)
    (layout,) = layouts
    return {
        file.name: TensorFile(
            {one.name: FileTensor(DTYPES[one.dtype], one.shape, memoryview(b"")) for one in file.tensors},
            dict(file.aliases),
        )
        for file in layout.specs
    }


def with_others(files: Mapping[str, TensorFile], targets: Iterable[Target]) -> dict[str, TensorFile]:
    """The files with what other ranks save, as they will be read."""
    found = {name: TensorFile(dict(file.tensors), dict(file.aliases)) for name, file in files.items()}
    for target in targets:
        file, name = file_and_tensor(target.name)
        tensors, aliases = (into := found.setdefault(file, TensorFile({}, {}))).tensors, into.aliases
        if target.alias_of is None:
            tensors[name] = FileTensor(getattr(torch, target.dtype), target.shape, memoryview(b""))
        else:
            aliases[name] = file_and_tensor(target.alias_of)[1]
    return found


def in_slot(targets: Iterable[Target], view: Callable[[StateName], memoryview]) -> dict[str, TensorFile]:
    """The same with the bytes that a slot has."""
    found: dict[str, dict[str, FileTensor]] = {}
    for target in targets:
        if target.alias_of is None:
            file, name = file_and_tensor(target.name)
            dtype, data = getattr(torch, target.dtype), view(target.name)
            if target.order != tuple(range(len(target.shape))):
                lying = FileTensor(dtype, tuple(target.shape[dim] for dim in target.order), data).view()
                back = [target.order.index(dim) for dim in range(len(target.shape))]
                data = memoryview(as_bytes(lying.permute(back)).numpy())  # type: ignore[arg-type]
            found.setdefault(file, {})[name] = FileTensor(dtype, target.shape, data)
    return {file: TensorFile(tensors, {}) for file, tensors in found.items()}


def saved_in(files: Mapping[str, TensorFile], name: StateName) -> FileTensor:
    """A tensor of these files by its state name."""
    file, tensor = file_and_tensor(name)
    return files[file].tensors[tensor]


def file_and_tensor(name: StateName) -> tuple[str, str]:
    """("model.safetensors", "features.0.weight") for "model/features.0.weight"."""
    return file_of(name.holder), name.path
