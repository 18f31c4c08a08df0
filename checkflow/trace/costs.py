"""Floating-point operations, bytes moved and arithmetic dtype of one operator call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils import flop_counter

from checkflow.dtypes import name_of
from checkflow.torch_internals import OpOverload, schema_of
from checkflow.trace.writes import METADATA_ONLY, aten, named_arguments, tensors_in, traits

_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_ALLOCATES_ONLY = aten("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
_COPY_IN = "fsdp::all_gather_copy_in"  # fills this rank's part of its second argument
# They read of their first tensor only what they select.
_SELECTS = aten("embedding index_select index gather take")
# They change of their first argument only what the others select.
_SCATTERS = aten(
    "index_add_ index_copy_ index_fill_ index_put_ _index_put_impl_ scatter_ scatter_add_ scatter_reduce_ put_"
)


def flops_of(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> int:
    """Floating-point operations of matrix products, convolutions and attention (torch.utils.flop_counter); others 0."""
    name = schema_of(op).name
    if name == _CPU_ATTENTION:
        shapes = [t.shape for t in tensors_in(args[:3])]
        return int(flop_counter.sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    if name == _CPU_ATTENTION + "_backward":
        shapes = [t.shape for t in tensors_in(args[:4])]
        return int(flop_counter.sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = flop_counter.flop_registry.get(op.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def view_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a strided view really touches: an expanded dimension counts once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size


def traffic_of(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    changed: frozenset[str],
    fresh: Sequence[torch.Tensor],
) -> int:
    """Bytes read of the arguments plus bytes written to arguments and fresh results. Allocating alone moves nothing."""
    name = schema_of(op).name
    if name in _ALLOCATES_ONLY:
        return 0
    if name == _COPY_IN:
        return 2 * sum(view_bytes(t) for t in tensors_in(args[0]))
    unread = traits(op).unread
    total = sum(view_bytes(t) for t in fresh)
    limit = total if name in _SELECTS else None
    if name in _SCATTERS:
        limit = sum(view_bytes(t) for t in tensors_in([*args[1:], *kwargs.values()]))
    for position, (argument, value) in enumerate(named_arguments(op, args, kwargs)):
        size = sum(view_bytes(t) for t in tensors_in(value))
        if limit is not None and position == 0:
            size = min(size, limit)
        total += size * ((argument not in unread) + (argument in changed))
    return total


def dtype_of(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> str:
    """The widest-category dtype the operator computes in: its first floating-point tensor's, else its first one's."""
    given = [] if schema_of(op).name in METADATA_ONLY else list(tensors_in([*args, *kwargs.values()]))
    tensors = given or list(tensors_in(result))
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            return _name(tensor.dtype)
    return _name(tensors[0].dtype if tensors else kwargs.get("dtype") or torch.get_default_dtype())


def _name(dtype: object) -> str:
    return name_of(dtype)
