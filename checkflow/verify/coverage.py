"""Every byte of each written state tensor is in exactly one part."""

from __future__ import annotations

from collections.abc import Sequence

from checkflow.verify.failure import fail
from checkflow.verify.rows import Part, named
from checkflow.verify.terms import Terms


def check_coverage(terms: Terms, parts: Sequence[Part], table: str) -> None:
    """Raises VerificationError unless the parts partition the state, in allowed sizes, cut at granules."""
    numbers: list[list[int]] = [[] for _ in terms.state]
    for number, part in enumerate(parts):
        if not 0 <= part.state < len(terms.state):
            fail(f"{table} row {number}: state {part.state} is not one of {len(terms.state)}")
        where = named(terms, table, number, part)
        if part.size_bytes < 1:
            fail(f"{where}: {part.size_bytes} bytes are not a chunk")
        if terms.chunk_bytes is not None and part.size_bytes > terms.chunk_bytes:
            fail(f"{where}: {part.size_bytes} bytes are more than the largest chunk, {terms.chunk_bytes}")
        if part.offset_bytes % terms.granule_bytes:
            fail(f"{where}: its offset is not a multiple of the granule, {terms.granule_bytes} bytes")
        numbers[part.state].append(number)
    for state, found in zip(terms.state, numbers, strict=True):
        covered = 0
        for number in sorted(found, key=lambda number: parts[number].offset_bytes):
            offset_bytes = parts[number].offset_bytes
            if offset_bytes != covered:
                where = named(terms, table, number, parts[number])
                first, last = sorted((offset_bytes, covered))
                fail(f"{where}: bytes {first}..{last} are covered {'twice' if offset_bytes < covered else 'by no row'}")
            covered += parts[number].size_bytes
        if covered != state.size_bytes:
            fail(f"{table}: {state.name} has {state.size_bytes} bytes, of which the rows cover {covered}")
