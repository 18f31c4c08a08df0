"""A table on a notebook's page: Markdown where it can be shown, aligned text where not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """Cells as text. The first `left` columns are words and stand to the left; the others are figures."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1

    def __repr__(self) -> str:
        lines = (self.headings, *self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(self._aligned(line, widths)).rstrip() for line in lines)

    def _repr_markdown_(self) -> str:
        rule = tuple(":--" if number < self.left else "--:" for number in range(len(self.headings)))
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.headings, rule, *self.rows))

    def _aligned(self, line: tuple[str, ...], widths: list[int]) -> list[str]:
        cells = enumerate(zip(line, widths, strict=True))
        return [f"{text:<{width}}" if number < self.left else f"{text:>{width}}" for number, (text, width) in cells]
