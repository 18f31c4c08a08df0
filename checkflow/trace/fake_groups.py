"""What torch.distributed lacks over a group that moves nothing, on fake tensors or real ones: for meshes, and DDP."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed as parallel

from checkflow.errors import ModelFileError
from checkflow.graph import Role
from checkflow.torch_internals import FakeTensor, without_modes
from checkflow.torch_ranks import (
    ASSIGN_BUCKETS,
    DDP_AT_FIRST,
    REBUILD_BUCKETS,
    first_bucket_bytes,
    reduce_buckets_by,
    reducer_class,
)
from checkflow.trace.execution import user_line
from checkflow.trace.replaced import replaced
from checkflow.trace.storages import Ledger
from checkflow.trace.values import Values


@contextmanager
def over_fake_groups(values: Values, ledger: Ledger) -> Iterator[None]:
    """Within, a mesh has its ranks as they are, and DistributedDataParallel's processes are alike from the beginning.

    Its buckets are at once what it makes of them after an iteration.
    """
    with ExitStack() as undo:
        undo.enter_context(replaced(DeviceMesh, "__init__", _of_values(DeviceMesh.__init__, values)))
        for name in DDP_AT_FIRST:
            undo.enter_context(replaced(parallel, name, _nothing))
        undo.enter_context(replaced(reducer_class(), REBUILD_BUCKETS, _nothing))
        wrapper = parallel.DistributedDataParallel
        undo.enter_context(replaced(wrapper, "__init__", _summing(wrapper.__init__, ledger)))
        undo.enter_context(replaced(wrapper, "register_comm_hook", _refuse_hook))
        yield


def _of_values(make: Callable[..., None], values: Values) -> Callable[..., None]:
    def made(*args: object, **kwargs: object) -> None:
        real = [_real(value, values) for value in args]
        named = {name: _real(value, values) for name, value in kwargs.items()}
        with without_modes():
            make(*real, **named)

    return made


def _real(value: object, values: Values) -> object:
    return values.of(value) if isinstance(value, FakeTensor) else value


def _by_readiness(cap_mb: float | None) -> Callable[..., tuple[list[list[int]], list[int]]]:
    """Buckets as they are rearranged when it was seen which gradients come first: taken to be the last parameters'.

    Those of the first iteration are one, unless parameters may be unused: then they are what stays.
    """
    assign = getattr(torch.distributed, ASSIGN_BUCKETS)
    cap = int((25 if cap_mb is None else cap_mb) * 2**20)
    limits = [first_bucket_bytes() if cap_mb is None else cap, cap]

    def assigned(
        parameters: Sequence[torch.Tensor], asked: list[int], sparse: Sequence[bool] = (), *more: object
    ) -> tuple[list[list[int]], list[int]]:
        if asked != [sys.maxsize]:
            return assign(parameters, asked, sparse, *more)  # type: ignore[no-any-return]
        buckets, sizes = assign(parameters[::-1], limits, sparse[::-1], *more)
        last = len(parameters) - 1
        return [[last - index for index in bucket] for bucket in buckets][::-1], sizes[::-1]

    return assigned


def _refuse_hook(*_args: object, **_kwargs: object) -> None:
    raise ModelFileError(
        f"{user_line()}: DistributedDataParallel's communication hooks are not traced yet; register none where "
        "torch.distributed.get_backend() is 'fake'"
    )


def _nothing(*_args: object, **_kwargs: object) -> bool:
    return False


def _summing(make: Callable[..., None], ledger: Ledger) -> Callable[..., None]:
    """The fake group's own work has no result, which DistributedDataParallel asks for."""

    def made(self: parallel.DistributedDataParallel, *args: object, **kwargs: object) -> None:
        cap = kwargs.get("bucket_cap_mb")
        with replaced(torch.distributed, ASSIGN_BUCKETS, _by_readiness(cap if isinstance(cap, (int, float)) else None)):
            make(self, *args, **kwargs)

        def sum_(bucket: torch.Tensor) -> None:
            ledger.see(bucket).role = Role.GRADIENT
            torch.distributed.all_reduce(bucket, group=self.process_group, async_op=True)

        reduce_buckets_by(self, sum_)

    return made
