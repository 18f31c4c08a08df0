"""Which safetensors files a training's state goes to, and under which names."""

from __future__ import annotations

from checkflow.errors import InputError
from checkflow.hoststate.optimizers import file_of
from checkflow.runtime.binding import Binding, Target
from checkflow.statenames import StateName
from checkflow.store.layout import FileSpec, Layout, TensorSpec

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip
"""torch's dtypes and safetensors' codes."""


def layout_of(binding: Binding) -> Layout:
    """The files of a training's checkpoint: one for each model and each optimizer that has tensors."""
    tensors: dict[str, list[TensorSpec]] = {}
    aliases: dict[str, list[tuple[str, str]]] = {}
    for target in binding.targets.values():
        file, name = file_and_tensor(target.name)
        tensors.setdefault(file, [])
        if target.alias_of is not None:
            aliases.setdefault(file, []).append((name, file_and_tensor(target.alias_of)[1]))
        else:
            tensors[file].append(_spec(name, target))
    return Layout.of(tuple(FileSpec(f, tuple(found), tuple(aliases.get(f, ()))) for f, found in tensors.items()))


def _spec(name: str, target: Target) -> TensorSpec:
    if target.dtype not in _CODES:
        raise InputError(f"{target.name}: dtype {target.dtype} cannot be stored; convert it before attach")
    logical = target.order == tuple(range(len(target.shape)))
    return TensorSpec(name, _CODES[target.dtype], target.shape, None if logical else target.order)


def file_and_tensor(name: str) -> tuple[str, str]:
    """("model.safetensors", "features.0.weight") for "model/features.0.weight"."""
    parsed = StateName.parse(name)
    return file_of(parsed.holder), parsed.path
