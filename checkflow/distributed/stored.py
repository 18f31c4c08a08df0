"""Which checkpoints of a training in several processes a bucket has parts of."""

from __future__ import annotations

from collections.abc import Mapping

from checkflow.distributed.marks import Mark
from checkflow.errors import CorruptStoreError, FormatError
from checkflow.state.host.record import parse_record
from checkflow.store.bucket.download import read_record
from checkflow.store.bucket.objects import Objects


def mark_of(objects: Objects, name: str, sizes: Mapping[str, int], *, processes: int) -> Mark:
    """Of the checkpoint of this name, whose objects have these sizes, of a training in so many.

    What one process took before there were several has attempt 0. Raises CorruptStoreError where its record does not
    say it, BucketError.
    """
    try:
        record = parse_record(read_record(objects, name, sizes))
    except FormatError as error:
        raise CorruptStoreError(str(error)) from None
    if record.member is not None:
        return Mark(record.member.attempt, record.iteration)
    if processes > 1:
        raise CorruptStoreError(f"is of one process, among those of {processes}")
    return Mark(0, record.iteration)
