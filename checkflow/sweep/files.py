"""Answers as flat records, as JSON and as CSV: the same columns and values in each."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from checkflow.errors import InputError
from checkflow.jsonfile import render, write_text
from checkflow.sweep.cells import Answer, Edge, Row
from checkflow.sweep.feasibility_edge import value_of

FORMAT, VERSION = "checkflow-sweep", 2

Value = str | int | float | bool | None
Record = dict[str, Value]

_WHOLE, _DECIMAL = re.compile(r"-?\d{1,15}"), re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d{1,2})?")
_OF_ROW = tuple(
    name for name in Row.model_fields if name not in ("cell", "device", "bandwidth_bytes_per_s", "interval")
)


def records(answers: Sequence[Answer]) -> list[Record]:
    """One flat record an answer, all with the same keys.

    First the cell: model, factory arguments (numbers as numbers; "set." before a name that is also another column's),
    device, bandwidth, and so on, as they came out where the cell left them open. Then the figures of Row. Of an Edge:
    those of the row found, and before them `found` and `fails`, the values on its axis.
    """
    names = sorted({name for answer in answers for name, _ in _row_of(answer).cell.settings})
    return [_record(answer, names) for answer in answers]


def document(answers: Sequence[Answer]) -> dict[str, object]:
    """What --json prints and a .json file holds."""
    return {"format": FORMAT, "version": VERSION, "rows": records(answers)}


def write(path: Path, answers: Sequence[Answer]) -> None:
    """Write answers, whole or not at all, as the suffix says. Raises InputError where that cannot be done."""
    write_text(path, WRITERS[path.suffix](answers))


def _csv(answers: Sequence[Answer]) -> str:
    rows = records(answers)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json(answers: Sequence[Answer]) -> str:
    return render(document(answers))


WRITERS: dict[str, Callable[[Sequence[Answer]], str]] = {".json": _json, ".csv": _csv}


def _row_of(answer: Answer) -> Row:
    """The row that speaks for an answer: of an edge the feasible one, where there is one."""
    if isinstance(answer, Row):
        return answer
    row = answer.found or answer.fails
    assert row is not None, "an edge has a row"
    return row


def _record(answer: Answer, names: Sequence[str]) -> Record:
    row = _row_of(answer)
    cell, settings = row.cell, dict(row.cell.settings)
    fixed: Record = {
        "device": row.device or cell.device,
        "policy": cell.policy,
        "formulation": cell.formulation,
        "chunk_bytes": cell.chunk_bytes,
        "slack": cell.slack_ppm / 1e6,
        "interval": row.interval or cell.interval,
        "bandwidth_bytes_per_s": row.bandwidth_bytes_per_s or cell.bandwidth_bytes_per_s,
    }
    if isinstance(answer, Edge):
        fixed |= _edge(answer)
    figures: Record = {name: getattr(row, name) for name in _OF_ROW} | {"exceeds_memory": row.exceeds_memory}
    taken = {"model", *fixed, *figures}
    own = {f"set.{name}" if name in taken else name: _plain(settings.get(name)) for name in names}
    return {"model": cell.model} | own | fixed | figures


def _edge(edge: Edge) -> Record:
    axis = edge.search.axis
    return {
        "find": axis,
        "found": None if edge.found is None else value_of(edge.found, axis),
        "fails": None if edge.fails is None or edge.failed else value_of(edge.fails, axis),
        "fails_message": edge.fails.message if edge.fails else None,
        "tried": edge.tried,
        "note": edge.message,
    }


def _plain(text: str | None) -> Value:
    """A factory argument as the number that it is, where it is one."""
    if text is None:
        return None
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def check_suffix(path: Path) -> None:
    """Raises InputError, before any work, for an output whose suffix says neither JSON nor CSV."""
    if path.suffix not in WRITERS:
        raise InputError(f"{path}: its name has to end in {' or '.join(WRITERS)}; --json prints the rows")
