"""An optimizer whose state ranks divide by parameter (ZeroRedundancyOptimizer), as if one of them kept all of it.

Each rank's record says of which parameters it has the state, and which ranks have that of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from checkflow.distributed.parts import Complete
from checkflow.errors import FormatError
from checkflow.state.host.record import OptimizerRecord, Record
from checkflow.state.live import kept_here
from checkflow.state.names import StateName
from checkflow.state.restore.optimizers import stored_in
from checkflow.training import Training


def has_state_for(record: Record, training: Training) -> bool:
    """Whether a rank's record has the state of all parameters that this rank keeps it of."""
    kept = kept_here(training)
    return all(
        optimizer.partition is None or kept.get(optimizer.name, frozenset()) <= set(optimizer.partition.parameters)
        for optimizer in record.optimizers
    )


def with_whole_optimizers(parts: Complete, number: int) -> Complete:
    """The same where the record of rank `number` has the state of all parameters, and says whose files have its
    tensors.

    Raises FormatError where records do not have each parameter's once.
    """
    part = parts.ranks[number]
    if all(optimizer.partition is None for optimizer in part.record.optimizers):
        return parts
    elsewhere, found = dict(part.record.elsewhere), []
    for optimizer in part.record.optimizers:
        of_ranks = dict(_of_ranks(parts, number, optimizer))
        found.append(_joined(optimizer, of_ranks))
        for rank, theirs in of_ranks.items():
            if rank != number:
                elsewhere |= {StateName.of(optimizer.name, path): rank for path in stored_in(theirs)}
    record = part.record.model_copy(update={"optimizers": tuple(found), "elsewhere": elsewhere})
    whole = replace(part, record=record)
    return replace(parts, ranks=(*parts.ranks[:number], whole, *parts.ranks[number + 1 :]))


def _of_ranks(parts: Complete, number: int, optimizer: OptimizerRecord) -> Iterator[tuple[int, OptimizerRecord]]:
    """What each rank's record says of it, by rank."""
    for rank in (number,) if optimizer.partition is None else optimizer.partition.ranks:
        records = parts.ranks[rank].record.optimizers if rank < parts.size else ()
        theirs = next((other for other in records if other.name == optimizer.name), None)
        if theirs is None or theirs.partition is None:
            if rank != number:
                raise FormatError(f"{optimizer.name}: rank {rank} has no part of its state; take another checkpoint")
            theirs = optimizer
        yield rank, theirs


def _joined(optimizer: OptimizerRecord, of_ranks: dict[int, OptimizerRecord]) -> OptimizerRecord:
    if optimizer.partition is None:
        return optimizer
    theirs = of_ranks.values()
    kept = [name for each in theirs if each.partition is not None for name in each.partition.parameters]
    every = {name for group in optimizer.groups for name in group.parameters}
    if sorted(kept) != sorted(every):
        raise FormatError(f"{optimizer.name}: its ranks do not keep each parameter once; take another checkpoint")
    return optimizer.model_copy(
        update={
            "cohorts": tuple(cohort for each in theirs for cohort in each.cohorts),
            "tied": {name: other for each in theirs for name, other in each.tied.items()},
            "orders": {name: order for each in theirs for name, order in each.orders.items()},
            "partition": None,
        }
    )
