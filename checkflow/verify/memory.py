"""The peak: resident bytes and snapshots, over steps folded modulo kT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from checkflow.verify.terms import Terms


class Hold(NamedTuple):
    """A snapshot's memory, at unrolled steps first..last."""

    first: int
    last: int
    size_bytes: int


def peak_of(terms: Terms, holds: Iterable[Hold]) -> int:
    """Largest of resident + snapshots, in bytes."""
    period = terms.interval * terms.steps
    change: Counter[int] = Counter({0: 0, period: 0})  # of the snapshots' bytes, by step - 1
    for hold in holds:
        whole, rest = divmod(hold.last - hold.first + 1, period)
        first = (hold.first - 1) % period
        change[0] += whole * hold.size_bytes
        change[first] += hold.size_bytes
        if first + rest <= period:
            change[first + rest] -= hold.size_bytes
        else:
            change[0] += hold.size_bytes
            change[first + rest - period] -= hold.size_bytes
    resident_bytes = terms.resident_bytes * 2  # so that a span across the iteration's end is one slice
    peak_bytes = terms.training_peak_bytes
    places = sorted(change)
    for place, after, held in zip(places, places[1:], accumulate(change[place] for place in places), strict=False):
        first, length = place % terms.steps, after - place
        if held and length >= terms.steps:
            peak_bytes = max(peak_bytes, terms.training_peak_bytes + held)
        elif held:
            peak_bytes = max(peak_bytes, max(resident_bytes[first : first + length]) + held)
    return peak_bytes
