"""Who saves what several ranks have alike: each a share of it, so that it is read and written once and not by each."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_EVEN = 2


@dataclass(frozen=True, slots=True)
class Division:
    """For this `rank`. `savers`: by a parameter's name the ranks that have it alike, whoever saves it first.

    `entries_stay`: what an optimizer keeps of a parameter is saved by who saves that, as it has to be where updates are
    made again.
    """

    rank: int
    savers: Mapping[str, tuple[int, ...]]
    entries_stay: bool = False

    @classmethod
    def of(cls, rank: int, alike: Iterable[tuple[Sequence[int], Mapping[str, int]]]) -> Division | None:
        """Of sizes in bytes of parameters, by name, with the ranks, ascending, that have these alike. Where one of the
        ranks would save nothing, all of them save all; None where nothing is divided.

        The largest goes first, each to who has least so far (Graham 1969, "Bounds on multiprocessing timing anomalies":
        at most 4/3 of what is best for the fullest).
        """
        savers: dict[str, tuple[int, ...]] = {}
        for ranks, sizes_bytes in alike:
            if not 2 <= len(ranks) <= len(sizes_bytes):
                continue
            filled = [(0, place) for place in range(len(ranks))]
            for name, size_bytes in sorted(sizes_bytes.items(), key=lambda found: (-found[1], found[0])):
                have_bytes, place = heapq.heappop(filled)
                savers[name] = (*ranks[place:], *ranks[:place])
                heapq.heappush(filled, (have_bytes + size_bytes, place))
        return cls(rank, savers) if savers else None

    def is_even(self, sizes_bytes: Mapping[str, int]) -> bool:
        """Whether the fullest share of parameters of these sizes, by name, is at most twice the least."""
        shares = dict.fromkeys((rank for ranks in self.savers.values() for rank in ranks), 0)
        for name, size_bytes in sizes_bytes.items():
            shares[self.saver_of(name)] += size_bytes
        return max(shares.values()) <= _EVEN * min(shares.values())

    def saver_of(self, parameter: str, entry: str = "") -> int:
        """The rank that saves a parameter, or an entry of an optimizer's state of it.

        Unless they stay, entries go round, so that of one large parameter not all is saved by one rank.
        """
        ranks = self.savers[parameter]
        return ranks[0 if self.entries_stay else sum(entry.encode()) % len(ranks)]
