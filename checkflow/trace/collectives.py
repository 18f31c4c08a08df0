"""Operators that ranks run together: which they are, among how many, and what they move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from checkflow.graph import Collective, CollectiveKind
from checkflow.torch_internals import OpOverload, schema_of
from checkflow.torch_ranks import members_of
from checkflow.trace.writes import named_arguments, tensors_in

# They give their argument back, once it is there, or in a tensor that will wait for that.
WAITS = frozenset(("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"))

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_GROUPS = ("process_group", "group_name")
# By what a name begins with, underscores aside: the longest that fits. What only waits has no group.
_KINDS = {
    "all_gather": CollectiveKind.ALL_GATHER,
    "allgather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "shard_dim_alltoall": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.ROOTED,
    "reduce": CollectiveKind.ROOTED,
    "gather": CollectiveKind.ROOTED,
    "scatter": CollectiveKind.ROOTED,
    "send": CollectiveKind.BETWEEN_TWO,
    "recv": CollectiveKind.BETWEEN_TWO,
    "isend": CollectiveKind.BETWEEN_TWO,
    "irecv": CollectiveKind.BETWEEN_TWO,
    "batch_p2p_ops": CollectiveKind.BETWEEN_TWO,
    "barrier": CollectiveKind.BARRIER,
    "monitored_barrier": CollectiveKind.BARRIER,
}


def collective_of(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
) -> Collective | None:
    """What ranks do together in this call; None where it is none of theirs, or only waits for what they do."""
    if op.namespace not in _NAMESPACES:
        return None
    given = dict(named_arguments(op, args, kwargs))
    group = next((given[name] for name in _GROUPS if name in given), None)
    kind = _kind(schema_of(op).name.partition("::")[2].strip("_"))
    if group is None or kind is None:
        return None
    members = sorted(members_of(group))
    whole = max(_bytes(result), *(_bytes(value) for value in given.values()))
    stride = min((after - before for before, after in pairwise(members)), default=1)
    return Collective(kind, 0 if kind is CollectiveKind.BARRIER else whole, len(members), stride)


def _kind(name: str) -> CollectiveKind | None:
    fitting = [known for known in _KINDS if name.startswith(known)]
    return _KINDS[max(fitting, key=len)] if fitting else None


def _bytes(value: object) -> int:
    """The largest argument, or the result, is what all have together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
