"""What PyTorch keeps to itself of processes, and of what they share, as torch_internals.py has the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.tensor import DTensor


class KeyValues(Protocol):
    """A store that processes meet in. Errors of reaching it are RuntimeErrors."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...
    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Of torch.distributed's processes: which of how many this one is, and a connection to their store, in which keys
    begin with a prefix. `number` counts how often this process has met its present group, from 1 on; `address`: host
    and port of their store, if it has any."""

    rank: int
    size: int
    connect: Callable[[str], KeyValues]
    number: int = 1
    address: tuple[str, int] | None = None


_meetings: WeakKeyDictionary[torch.distributed.ProcessGroup, int] = WeakKeyDictionary()


def ranks_here() -> int:
    """Of torch.distributed's group of this process; 1 where there is none."""
    return torch.distributed.get_world_size() if is_in_group() else 1


def is_in_group() -> bool:
    """Whether this process is one of torch.distributed's processes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def meeting_place() -> MeetingPlace | None:
    """Of this process. None where torch.distributed is not initialized."""
    if not is_in_group():
        return None
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_default_store

    def connect(prefix: str) -> KeyValues:
        return PrefixStore(prefix, _get_default_store().clone())  # type: ignore[attr-defined]

    group = _get_default_group()  # init_process_group anew makes another, with processes that may be new
    _meetings[group] = _meetings.get(group, 0) + 1
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return MeetingPlace(rank, size, connect, _meetings[group], _address_of(_get_default_store()))


def _address_of(store: Any) -> tuple[str, int] | None:
    while hasattr(store, "underlying_store"):  # it gives keys a prefix
        store = store.underlying_store
    return (str(store.host), int(store.port)) if hasattr(store, "host") and hasattr(store, "port") else None


def own_values() -> KeyValues:
    """A store that only this process has."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()


def plans_kept() -> dict[str, Sequence[SavePlan]]:
    """Of each rank, what it planned last to save, where this process coordinates: by kind of planner with
    enable_plan_caching=True."""
    from torch.distributed.checkpoint.planner import SavePlanner

    return dict(SavePlanner._cached_global_plan)


def kind_of(planner: SavePlanner) -> str:
    """What planners share their plans by."""
    return str(getattr(planner, "_cached_plans_key", ""))


def join_fake_group(rank: int, size: int) -> None:
    """Make this process one of so many: torch's fake process group, whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


def leave_group() -> None:
    """This is one process again, and DTensor remembers no group that was."""
    if torch.distributed.is_initialized():  # code may have left it by itself
        torch.distributed.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug
        from torch.distributed.tensor._redistribute import _gen_transform_infos

        clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is None:  # an older torch, which has one cache of these
            dispatcher: Any = DTensor._op_dispatcher
            clear = dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
        clear()
        _gen_transform_infos.cache_clear()


def members_of(group: object) -> list[int]:
    """The ranks of a process group, as an operator is given one: the group or its name."""
    from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group, get_process_group_ranks  # type: ignore[attr-defined]

    named = isinstance(group, str)
    return get_process_group_ranks(_resolve_process_group(group) if named else ProcessGroup.unbox(group))  # type: ignore[arg-type]


DDP_AT_FIRST = ("_verify_param_shape_across_processes", "_sync_module_states")  # in the module of that class
REBUILD_BUCKETS = "_rebuild_buckets"  # of its reducer
ASSIGN_BUCKETS = "_compute_bucket_assignment_by_size"  # of torch.distributed


def reducer_class() -> type:
    """Of what arranges DistributedDataParallel's gradients in buckets."""
    found: type = torch.distributed.Reducer  # type: ignore[attr-defined]
    return found


def first_bucket_bytes() -> int:
    """How large its first bucket is, unless it was given a size for all."""
    found: int = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return found


def reduce_buckets_by(
    wrapper: torch.nn.parallel.DistributedDataParallel, reduce: Callable[[torch.Tensor], None]
) -> None:
    """Each bucket of its gradients is given to this in the place of an all-reduce, and done when it returns."""

    def hook(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.distributed._register_comm_hook(wrapper.reducer, None, hook)  # type: ignore[attr-defined]


def part_of(tensor: DTensor) -> torch.Tensor:
    """What this rank holds of a tensor that ranks share: the memory itself, and no view that autograd knows."""
    return tensor._local_tensor


def place_in_whole(tensor: DTensor) -> tuple[int, ...]:
    """The index of its first element in the whole, by dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def stretches_of(tensor: DTensor, dimension: int) -> list[range]:
    """Which indices of a dimension of the whole this rank's part has, by its placements: stretches that do not touch,
    in the part's order; none where this rank has nothing of it."""
    here = tensor.device_mesh.get_coordinate()
    found = [range(tensor.shape[dimension])] if here is not None else []
    for axis, (placement, at) in enumerate(zip(tensor.placements, here or (), strict=False)):
        if getattr(placement, "dim", None) != dimension:
            continue
        size = tensor.device_mesh.size(axis)
        pieces = [found]
        if (factor := getattr(placement, "split_factor", 1)) > 1:  # of _StridedShard, which takes a part of each piece
            pieces = [_chunk(found, factor, number) for number in range(factor)]
        found = _joined(stretch for piece in pieces for stretch in _chunk(piece, size, at))
    return found


def _chunk(stretches: Sequence[range], count: int, number: int) -> list[range]:
    """As torch.chunk divides what they have."""
    most = -(-sum(map(len, stretches)) // count)
    first, last = number * most, (number + 1) * most
    found: list[range] = []
    for stretch in stretches:
        found.append(stretch[max(first, 0) : max(last, 0)])
        first, last = first - len(stretch), last - len(stretch)
    return _joined(found)


def _joined(stretches: Iterable[range]) -> list[range]:
    found: list[range] = []
    for stretch in filter(len, stretches):
        if found and found[-1].stop == stretch.start:
            stretch = range(found.pop().start, stretch.stop)
        found.append(stretch)
    return found


def received_by(ddp: torch.nn.parallel.DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that it was made with, and does not ignore: each of its ranks has been sent their values."""
    return list(ddp._module_parameters)


def hook_states(ddp: torch.nn.parallel.DistributedDataParallel) -> list[object]:
    """What its communication hooks keep from one iteration to the next, as far as one can tell."""
    group = torch.distributed.ProcessGroup
    states = (state for _, state in ddp._comm_hooks if state is not None and not isinstance(state, group))
    return [state for state in states if not type(state).__module__.endswith(".mixed_precision_hooks")]  # streams


def sums_gradients(module: torch.nn.Module) -> bool:
    """Whether it is DDP's, or one of FSDP2's."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody imported it there is none
    return isinstance(module, (torch.nn.parallel.DistributedDataParallel, *((fsdp.FSDPModule,) if fsdp else ())))


def may_differ(module: torch.nn.Module) -> bool:
    """Whether this module of DDP or FSDP2 may now hand each replica another gradient: by a hook that is none of torch's
    that sum, or because it leaves out the all-reduce."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        own = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")  # where one is used
        summing = () if own is None else (own.allreduce_hook, own.fp16_compress_hook, own.bf16_compress_hook)
        return not all(any(hook is each for each in summing) for hook, _ in module._comm_hooks)
    if not sums_gradients(module):
        return False
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    several = getattr(state, "_fsdp_param_groups", None)  # an older torch has one at most
    groups = [state._fsdp_param_group] if several is None else several
    return any(
        group._all_reduce_hook is not None or not group.all_reduce_grads for group in groups if group is not None
    )
