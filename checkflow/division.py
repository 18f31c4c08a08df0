"""Who saves what all ranks have alike: each a share of it, so that it is read and written once and not by each."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """Among `ranks`, ascending, of which this is `rank`. `places`: of a parameter's rank among them, by its name."""

    rank: int
    ranks: tuple[int, ...]
    places: Mapping[str, int]

    @classmethod
    def of(cls, rank: int, ranks: Sequence[int], sizes_bytes: Mapping[str, int]) -> Division | None:
        """Of parameters of these sizes, by name; None where a rank would have nothing to save, or has no other.

        The largest goes first, each to who has least so far (Graham 1969, "Bounds on multiprocessing timing anomalies":
        at most 4/3 of what is best for the fullest).
        """
        if len(ranks) < 2 or len(sizes_bytes) < len(ranks):
            return None
        filled = [(0, place) for place in range(len(ranks))]
        places: dict[str, int] = {}
        for name, size_bytes in sorted(sizes_bytes.items(), key=lambda found: (-found[1], found[0])):
            have_bytes, place = heapq.heappop(filled)
            places[name] = place
            heapq.heappush(filled, (have_bytes + size_bytes, place))
        return cls(rank, tuple(ranks), places)

    def saver_of(self, parameter: str, entry: str = "") -> int:
        """The rank that saves a parameter, or an entry of an optimizer's state of it.

        Entries go round, so that of one large parameter not all is saved by one rank.
        """
        return self.ranks[(self.places[parameter] + sum(entry.encode())) % len(self.ranks)]
