"""Every byte of each written state tensor is in exactly one chunk."""

from __future__ import annotations

from collections.abc import Sequence

from checkflow.plan import Chunk, Problem
from checkflow.verify.failure import fail, row


def check_coverage(problem: Problem, chunks: Sequence[Chunk], table: str) -> None:
    """Raises VerificationError unless the chunks partition the state, in allowed sizes, cut at granules."""
    numbers: list[list[int]] = [[] for _ in problem.state]
    for number, chunk in enumerate(chunks):
        if not 0 <= chunk.state < len(problem.state):
            fail(f"{table} row {number}: state {chunk.state} is not one of {len(problem.state)}")
        where = row(problem, table, number, chunk)
        if chunk.size_bytes < 1:
            fail(f"{where}: {chunk.size_bytes} bytes are not a chunk")
        if problem.chunk_bytes is not None and chunk.size_bytes > problem.chunk_bytes:
            fail(f"{where}: {chunk.size_bytes} bytes are more than the largest chunk, {problem.chunk_bytes}")
        if chunk.offset_bytes % problem.granule_bytes:
            fail(f"{where}: its offset is not a multiple of the granule, {problem.granule_bytes} bytes")
        numbers[chunk.state].append(number)
    for state, found in zip(problem.state, numbers, strict=True):
        covered = 0
        for number in sorted(found, key=lambda number: chunks[number].offset_bytes):
            offset_bytes = chunks[number].offset_bytes
            if offset_bytes != covered:
                where = row(problem, table, number, chunks[number])
                first, last = sorted((offset_bytes, covered))
                fail(f"{where}: bytes {first}..{last} are covered {'twice' if offset_bytes < covered else 'by no row'}")
            covered += chunks[number].size_bytes
        if covered != state.size_bytes:
            fail(f"{table}: {state.name} has {state.size_bytes} bytes, of which the rows cover {covered}")
