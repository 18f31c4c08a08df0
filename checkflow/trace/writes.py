"""Which arguments an operator writes: its schema says, except for the operators in UNDECLARED and UNSCALING.

The table is checked by comparing bytes: WriteChecker runs operators on real tensors and collects what they changed
without `written` saying so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from checkflow.torch_internals import OpOverload, TorchDispatchMode, schema_of, storage_id, without_modes

# Operators that change arguments without declaring it: (arguments, the flag that makes them do so; "" is always).
UNDECLARED: dict[str, tuple[tuple[str, ...], str]] = {
    "aten::native_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::cudnn_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::miopen_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::_batch_norm_impl_index": (("running_mean", "running_var"), "training"),
    "aten::batch_norm_update_stats": (("running_mean", "running_var"), ""),
    "aten::batch_norm_gather_stats": (("running_mean", "running_var"), ""),
    "aten::batch_norm_gather_stats_with_counts": (("running_mean", "running_var"), ""),
    "aten::rrelu_with_noise": (("noise",), "training"),
    "aten::rrelu_with_noise_": (("noise",), "training"),
    "aten::_cudnn_rnn": (("dropout_state",), "train"),
    "aten::mkldnn_rnn_layer_backward": (("workspace",), ""),
    "aten::_fused_adam_": (("state_steps",), "found_inf"),
    "aten::_fused_adamw_": (("state_steps",), "found_inf"),
    "c10d::_allgather_base_": (("output_tensor",), ""),
    "c10d::_reduce_scatter_base_": (("output_tensor",), ""),
    "c10d::allgather_": (("output_tensors",), ""),
    "c10d::allgather_coalesced_": (("output_lists",), ""),
    "c10d::allgather_into_tensor_coalesced_": (("outputs",), ""),
    "c10d::allreduce_": (("tensors",), ""),
    "c10d::allreduce_coalesced_": (("tensors",), ""),
    "c10d::alltoall_": (("output_tensors",), ""),
    "c10d::alltoall_base_": (("output",), ""),
    "c10d::broadcast_": (("tensors",), ""),
    "c10d::gather_": (("output_tensors",), ""),
    "c10d::recv_": (("tensors",), ""),
    "c10d::recv_any_source_": (("tensors",), ""),
    "c10d::reduce_": (("tensors",), ""),
    "c10d::reduce_scatter_": (("output_tensors",), ""),
    "c10d::reduce_scatter_tensor_coalesced_": (("outputs",), ""),
    "c10d::scatter_": (("output_tensors",), ""),
    "fsdp::all_gather_copy_in": (("all_gather_output",), ""),
}


def aten(names: str) -> frozenset[str]:
    """Schema names of operators of aten."""
    return frozenset(f"aten::{name}" for name in names.split())


# They declare that they write gradients, and do so where they are given a scale to take off.
UNSCALING = aten("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")

# They overwrite their first argument without reading it.
OVERWRITES = aten(
    "copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ random_ geometric_ log_normal_ cauchy_ "
    "_foreach_copy_ _foreach_zero_"
) | {name for name, (written, _) in UNDECLARED.items() if name.startswith("c10d::") and written != ("tensors",)}
# They look at sizes and dtypes of their tensor arguments only.
METADATA_ONLY = aten(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided "
    "new_zeros new_ones new_full resize_ resize_as_"
)


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known about an operator before it runs; arguments by name."""

    names: tuple[str, ...]  # in order of position
    written: frozenset[str]  # declared
    unread: frozenset[str]
    undeclared: frozenset[str]
    flag: str  # argument that has to be true for the undeclared writes; "" for always
    returns_first: bool  # in place: it returns its first argument
    moves_metadata: bool  # in place, but only sizes and strides change


@cache
def traits(op: OpOverload) -> Traits:
    """The traits of an operator, from its schema and the tables above."""
    schema = schema_of(op)
    name = schema.name
    names = tuple(argument.name for argument in schema.arguments)
    inplace_view = torch.Tag.inplace_view in op.tags
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    unread = frozenset(a.name for a in schema.arguments if a.is_out)
    if name in METADATA_ONLY:
        unread |= frozenset(names)
    elif name in OVERWRITES:
        unread |= {names[0]}
    undeclared, flag = UNDECLARED.get(name, ((), ""))
    returned = schema.returns[0].alias_info if schema.returns else None
    returns_first = bool(returned is not None and returned.is_write and names and names[0] in written)
    return Traits(
        names=names,
        written=frozenset() if inplace_view else written,
        unread=unread,
        undeclared=frozenset(undeclared),
        flag=flag,
        returns_first=returns_first,
        moves_metadata=inplace_view,
    )


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument or result: itself, or in a list or tuple, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def named_arguments(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """(name, value) of the arguments given."""
    yield from zip(traits(op).names, args, strict=False)
    yield from kwargs.items()


def written(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> frozenset[str]:
    """Names of the arguments whose tensors this call changes."""
    known, declared = traits(op), traits(op).written
    if schema_of(op).name in UNSCALING and dict(named_arguments(op, args, kwargs)).get("grad_scale") is None:
        declared -= {"grads"}
    if not known.undeclared:
        return declared
    if known.flag:
        flag = dict(named_arguments(op, args, kwargs)).get(known.flag)
        if flag is None or flag is False:
            return declared
    return declared | known.undeclared


def check_writes(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[object, tuple[str, ...]]:
    """Run an operator on real tensors: (result, names of arguments whose bytes changed though `written` denies it)."""
    before = {
        name: [(storage, _bytes_of(storage)) for storage in (t.untyped_storage() for t in tensors_in(value))]
        for name, value in named_arguments(op, args, kwargs)
    }
    claimed = written(op, args, kwargs)
    result = op(*args, **kwargs)
    allowed = {storage_id(storage) for name in claimed for storage, _ in before.get(name, [])}
    changed = tuple(
        name
        for name, storages in before.items()
        if any(_bytes_of(s)[: len(old)] != old for s, old in storages if storage_id(s) not in allowed)
    )
    return result, changed


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    with without_modes():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole.cpu().numpy().tobytes()


@dataclass
class _Findings:
    operators: set[str] = field(default_factory=set)
    undeclared: set[tuple[str, str]] = field(default_factory=set)


class WriteChecker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, compares bytes around every operator. Slow: for small real tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings = _Findings()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result, changed = check_writes(func, args, kwargs or {})
        self.findings.operators.add(str(func))
        self.findings.undeclared |= {(str(func), name) for name in changed}
        return result
