"""A file's bytes in pieces ready to be written: as they lie in a slot, or packed one after the other."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator

from checkflow.dtypes import ITEM_BYTES
from checkflow.store.format.blocks import buffer_of
from checkflow.store.format.disk import WRITE_BYTES
from checkflow.store.format.layout import PlacedFile, PlacedTensor, padded


def pieces(slot: memoryview, file: PlacedFile) -> Iterator[memoryview]:
    """The file from its first byte to its padding, in pieces of 16 MiB at aligned addresses.

    Pieces without a tensor in another memory order are the slot's own bytes; the others are put together elsewhere.
    """
    whole = slot[file.offset_bytes : file.offset_bytes + file.padded_bytes]
    reordered = [tensor for tensor in file.tensors if tensor.spec.order is not None]
    logical: tuple[str, memoryview] | None = None
    for start in range(0, len(whole), WRITE_BYTES):
        piece = whole[start : start + WRITE_BYTES]
        low, high = file.offset_bytes + start, file.offset_bytes + start + len(piece)
        touched = [tensor for tensor in reordered if tensor.offset_bytes < high and tensor.end_bytes > low]
        if touched:
            own, piece = piece, memoryview(mmap.mmap(-1, len(piece)))  # page-aligned
            piece[:] = own
            for tensor in touched:
                if logical is None or logical[0] != tensor.spec.name:
                    logical = (tensor.spec.name, _logical(slot, tensor))
                first, last = max(low, tensor.offset_bytes), min(high, tensor.end_bytes)
                part = logical[1][first - tensor.offset_bytes : last - tensor.offset_bytes]
                piece[first - low : last - low] = part
        yield piece


def _logical(slot: memoryview, tensor: PlacedTensor) -> memoryview:
    """The tensor's bytes in logical order: its dimensions in memory, moved back to their places."""
    import numpy as np  # only a saver with such a tensor needs it

    spec = tensor.spec
    assert spec.order is not None
    in_memory = np.frombuffer(slot[tensor.offset_bytes : tensor.end_bytes], dtype=f"u{ITEM_BYTES[spec.dtype]}")
    shaped = in_memory.reshape([spec.shape[dimension] for dimension in spec.order])
    moved = shaped.transpose([spec.order.index(dimension) for dimension in range(len(spec.shape))])
    return memoryview(moved.tobytes())


def packed(sources: Iterable[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """A file of so many bytes from what is to follow without a hole, padded, in pieces of 16 MiB at aligned addresses.

    Each piece has memory of its own, and a source is asked for once the one before it is in a piece.
    """
    left = padded(size_bytes)
    piece, filled = buffer_of(min(WRITE_BYTES, left)), 0
    for source in sources:
        rest = source
        while len(rest):
            taken = min(len(rest), len(piece) - filled)
            piece[filled : filled + taken] = rest[:taken]
            rest, filled = rest[taken:], filled + taken
            if filled == len(piece):
                left -= filled
                yield piece
                piece, filled = buffer_of(min(WRITE_BYTES, left)), 0
    if filled:
        yield piece
