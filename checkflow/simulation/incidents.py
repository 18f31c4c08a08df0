"""What fails, and when: drawn from an exponential distribution, or read from a file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import numpy as np

from checkflow.errors import FormatError, InputError
from checkflow.jsonfile import check_no_device

_DRAWN = 1024  # at a time
_MOST_DIGITS = 18  # of a count: Python reads no number of thousands


class Loss(StrEnum):
    """What a failure takes: what the trainer had, or all that the machine's memory had."""

    TRAINER = "trainer"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class Incident:
    at_ns: int  # since training began
    loss: Loss


def exponential(mtbf_ns: float, machine_share: float, seed: int) -> Iterator[Incident]:
    """Without end. `mtbf_ns`: of all devices together; each of n fails n times as seldom."""
    if not mtbf_ns > 0:
        raise InputError(f"mean time between failures: {mtbf_ns} ns is not positive; give more")
    if not 0 <= machine_share <= 1:
        raise InputError(f"share of lost machines: {machine_share} is not in [0, 1]; 0.5 is every other failure")
    generator = np.random.default_rng(seed)
    now = 0.0
    while True:
        gaps = generator.exponential(mtbf_ns, _DRAWN).tolist()
        draws = generator.random(_DRAWN).tolist()
        for gap, draw in zip(gaps, draws, strict=True):
            now += gap
            yield Incident(int(now), Loss.MACHINE if draw < machine_share else Loss.TRAINER)


def read_incidents(path: Path) -> tuple[Incident, ...]:
    """Those of a CSV file, in order.

    Either its columns are time_s and loss (trainer or machine), or Time and GPUs, as in PCcheck's record of preempted
    machines: each time that fewer GPUs are there than before is a lost machine. Raises FormatError for what is neither.
    """
    rows = csv.DictReader(io.StringIO(_text(path)), strict=True)
    try:
        rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        for name in rows.fieldnames:
            if name and rows.fieldnames.count(name) > 1:
                raise FormatError(f"{path}: its first line names {name!r:.40} twice; name each column once")
        found = _incidents(path, rows)
    except csv.Error as error:
        raise FormatError(f"{path}: line {rows.line_num}: is no CSV ({error}); close each quote") from None
    if any(later.at_ns < earlier.at_ns for earlier, later in pairwise(found)):
        raise FormatError(f"{path}: times do not ascend; sort the rows")
    return tuple(found)


def _text(path: Path) -> str:
    """Without the mark that spreadsheets put before it."""
    try:
        check_no_device(path)
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"{path}: cannot be read ({reason}); give a CSV file") from None


def _incidents(path: Path, rows: csv.DictReader[str]) -> list[Incident]:
    columns = set(rows.fieldnames or ())
    whole = _whole_rows(path, rows)
    if {"time_s", "loss"} <= columns:
        return [
            Incident(_ns(path, rows.line_num, row["time_s"]), _loss(path, rows.line_num, row["loss"])) for row in whole
        ]
    if {"Time", "GPUs"} <= columns:
        counts = [(_ns(path, rows.line_num, row["Time"]), _count(path, rows.line_num, row["GPUs"])) for row in whole]
        began = counts[0][0] if counts else 0
        return [Incident(now - began, Loss.MACHINE) for (_, before), (now, left) in pairwise(counts) if left < before]
    raise FormatError(f"{path}: its first line names neither time_s and loss nor Time and GPUs; write one of them")


def _whole_rows(path: Path, rows: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    for row in rows:
        if None in row:  # where a DictReader puts cells without a column
            raise FormatError(
                f"{path}: line {rows.line_num}: has more cells than the first line names; write one for each"
            )
        yield row


def _ns(path: Path, line: int, text: str | None) -> int:
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds * 10**9 < math.inf:
        raise FormatError(f"{path}: line {line}: {text!r} is not a time in seconds; write it like 3600.5")
    return round(seconds * 10**9)


def _loss(path: Path, line: int, text: str | None) -> Loss:
    try:
        return Loss((text or "").strip())
    except ValueError:
        raise FormatError(f"{path}: line {line}: loss {text!r} is neither trainer nor machine; write one") from None


def _count(path: Path, line: int, text: str | None) -> int:
    digits = (text or "").strip()
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS:
        raise FormatError(f"{path}: line {line}: {digits[:20]!r} is not a number of GPUs; write a whole one")
    return int(digits)
