"""Columns beside each other, or below each other where a terminal is narrow: a number that is cut reads as another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

GAP = 2


@dataclass(frozen=True)
class Column:
    name: str
    texts: tuple[Text, ...]
    right: bool = False

    @property
    def width(self) -> int:
        return max((len(self.name), *(text.cell_len for text in self.texts)))


@dataclass(frozen=True)
class Columns:
    """One table, or several that all begin with `left`."""

    left: Sequence[Column]
    others: Sequence[Column]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        rest, room = list(self.others), options.max_width - sum(column.width + GAP for column in self.left)
        while rest:
            taken, used = 1, rest[0].width + GAP
            while taken < len(rest) and used + rest[taken].width + GAP <= room:
                used, taken = used + rest[taken].width + GAP, taken + 1
            yield _table([*self.left, *rest[:taken]])
            rest = rest[taken:]
            if rest:
                yield Text()


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", overflow="fold")
    for texts in zip(*(column.texts for column in columns), strict=True):
        table.add_row(*texts)
    return table


def show_pairs(console: Console, rows: Sequence[tuple[str, Text]]) -> None:
    """A name and what is said of it a line. Each is as long as it is, where none has to be folded."""
    first = max(len(name) for name, _ in rows)
    if first + GAP + max(text.cell_len for _, text in rows) <= console.width:
        for name, text in rows:
            console.print(Text(name.ljust(first + GAP), "bold") + text)
        return
    table = Table(box=None, show_header=False, padding=(0, GAP, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
