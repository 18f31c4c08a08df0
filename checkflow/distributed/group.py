"""The ranks of a training in several processes, and what they tell each other where training may wait: at attach and
restore.

They meet in the store of torch.distributed's own processes, under names of their own and over connections of their own:
no collective is involved, so that a rank that is missing is known by its number, and nobody waits for it for good.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from checkflow import strictjson
from checkflow.errors import CheckflowError, PeerError
from checkflow.interrupts import let_through
from checkflow.jsonfile import digest_of
from checkflow.store.format.ranks import ranks_have
from checkflow.torch_ranks import KeyValues, is_in_group, meeting_place, own_values

DEADLINE_S = 600.0
LEAVING_S = 10.0
_HEARD_S = 3.0  # for which the first rank stays after an error
_FAILED = "failed"
_PAUSE_S = (0.001, 0.05)  # between looks, at first and at most


@dataclass(eq=False)
class Group:
    """This process is `rank` of `size`; `deadline_s`: how long others are waited for.

    `values` and `more` are two connections to one store, for two threads. What ranks say belongs to an occasion, a call
    that each makes: who fails in one, and catches that, meets the others again in the next.
    """

    rank: int
    size: int
    deadline_s: float
    values: KeyValues
    more: KeyValues
    met_at: tuple[str, int] | None = None  # host and port of the store of all
    _occasions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _occasion: int = 0
    _count: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of what was said on this occasion

    @classmethod
    def here(cls, deadline_s: float = DEADLINE_S) -> Group | None:
        """The group of this process; None where it trains alone."""
        met = meeting_place()
        if met is None or met.size == 1:
            return None
        values = met.connect(f"checkflow/{met.number}")  # every rank attaches its trainings in the same order
        meeting = cls(met.rank, met.size, deadline_s, values, values)._met()
        return cls(met.rank, met.size, deadline_s, met.connect(meeting), met.connect(meeting), met.address)

    @classmethod
    def alone(cls) -> Group:
        """Of one process, where there have been several."""
        values = own_values()
        return cls(0, 1, DEADLINE_S, values, values)

    def _met(self) -> str:
        """A name for this meeting, the same on all ranks, that no other meeting has had.

        A store may outlive processes, as where torchrun starts them again, and what they said is still there. So each
        rank draws a number, and says which numbers it sees; it has met the others once all see the same ones. A process
        of before cannot have seen this one's.
        """
        drawn, said = ([f"{word}/{rank}" for rank in range(self.size)] for word in ("drawn", "seen"))
        seen = ""
        with reached():
            self.values.set(drawn[self.rank], secrets.token_hex(16))
        for _ in self._looks():
            with reached():
                if self.values.check(drawn):
                    now = digest_of([each.decode() for each in self.values.multi_get(drawn)])
                    if now != seen:
                        seen = now
                        self.values.set(said[self.rank], seen)
                    if self.values.check(said) and set(self.values.multi_get(said)) == {seen.encode()}:
                        return f"checkflow/{seen}"
        with reached():
            absent = [rank for rank, key in enumerate(drawn) if not self.values.check([key])]
            late = absent or [rank for rank, key in enumerate(said) if self._held(key) != seen.encode()]
        raise self._late("attach()", late)

    def _held(self, key: str) -> bytes:
        """What the store has, and nothing where it has none."""
        return self.values.get(key) if self.values.check([key]) else b""

    def gather(self, what: str, value: object) -> list[object]:
        """What each rank says, by rank; values of JSON. `what` names the occasion to a person: "attach()".

        Every rank calls this in the same order. Raises PeerError that names who has not said anything by the deadline,
        or what another rank has failed with.
        """
        key = f"{self._occasion}/{next(self._count)}"
        with reached():
            self.values.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._wait(what, keys)
        with reached():
            return [strictjson.loads(found) for found in self.values.multi_get(keys)]

    def leave(self, value: object) -> list[object]:
        """Wait for a little until every rank has called this, and return what each says; nothing where not all have.

        The first rank stays until all know that, or have left without: the store of all may be in its process.
        """
        until = time.monotonic() + min(LEAVING_S, self.deadline_s)
        try:
            said = self._all_say("left", json.dumps(value), until)
        except RuntimeError:
            return []  # the store is gone already
        with suppress(RuntimeError):  # so is the first rank, which has known it then
            self._all_say("knows", "", until if said and self.rank == 0 else 0.0)
        return [strictjson.loads(each) for each in said]

    def _all_say(self, word: str, value: str, until: float) -> list[bytes]:
        """Say it, and return what each has said; nothing where not all have by then (of time.monotonic)."""
        self.values.set(f"{word}/{self.rank}", value)
        everyone = [f"{word}/{rank}" for rank in range(self.size)]
        while not self.values.check(everyone):
            if time.monotonic() >= until:
                return []
            time.sleep(_PAUSE_S[1])
            let_through()
        return self.values.multi_get(everyone)

    @contextmanager
    def telling(self, *, for_good: bool = False) -> Iterator[None]:
        """One occasion, to which every rank comes. An error of this rank inside ends the waiting of the others there,
        with its message; `for_good`: on each occasion that follows, too, for this rank comes to none."""
        self._occasion, self._count = next(self._occasions), itertools.count(1)
        try:
            yield
        except PeerError as error:  # who comes late is not to wait for those that have left
            self._fail(str(error), for_good=for_good)
            raise
        except BaseException as error:
            said = str(error) if isinstance(error, CheckflowError) else f"{type(error).__name__}: {error}"
            self._fail(f"rank {self.rank}: {said}", for_good=for_good)
            raise
        finally:
            self._part(sys.exception())

    def same(self, what: str, value: Mapping[str, object]) -> None:
        """Raises PeerError, on each rank, that names the first field in which ranks differ."""
        everyone = self.gather(what, dict(value))
        for rank, other in enumerate(everyone):
            assert isinstance(other, dict)
            first = everyone[0]
            assert isinstance(first, dict)
            for key in value:
                if other.get(key) != first.get(key):
                    raise PeerError(
                        f"{key}: is {_said(first.get(key))} on rank 0, but {_said(other.get(key))} on rank {rank}; "
                        "give every rank the same"
                    )

    def _wait(self, what: str, keys: Sequence[str]) -> None:
        for _ in self._looks():
            with reached():
                if self.values.check(list(keys)):
                    return
                for failed in (f"{self._occasion}/{_FAILED}", _FAILED):
                    if self.values.check([failed]):
                        if self.values.check(list(keys)):  # it failed since, after all have said this
                            return
                        raise PeerError(self.values.get(failed).decode())
        with reached():
            missing = [rank for rank, key in enumerate(keys) if not self.values.check([key])]
        raise self._late(what, missing)

    def _looks(self) -> Iterator[None]:
        """Now and then, until others are waited for no more."""
        deadline, pause_s = time.monotonic() + self.deadline_s, _PAUSE_S[0]
        yield
        while time.monotonic() < deadline:
            time.sleep(pause_s)
            let_through()
            pause_s = min(2 * pause_s, _PAUSE_S[1])
            yield

    def _late(self, what: str, ranks: Sequence[int]) -> PeerError:
        return PeerError(
            f"{what}: {ranks_have(ranks)} not come to it within {self.deadline_s:g} s; call it on every rank, and see "
            "whether all run"
        )

    def _part(self, error: BaseException | None) -> None:
        """The occasion is over for this rank. The first one stays for a little after an error, until it is for all: the
        store of all may be in its process, which may end now."""
        stays = self.rank == 0 and isinstance(error, Exception)
        with suppress(RuntimeError):  # the store is gone already
            self._all_say(f"{self._occasion}/parted", "", time.monotonic() + _HEARD_S if stays else 0.0)

    def _fail(self, message: str, *, for_good: bool) -> None:
        """The first message counts."""
        with suppress(RuntimeError):  # nobody is left to hear it
            self.values.compare_set(_FAILED if for_good else f"{self._occasion}/{_FAILED}", "", message)


def not_met() -> Iterator[str]:
    """A line where this process is one of several that torchrun started, and no group of them is there yet."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    is_torchruns = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"))
    if several and is_torchruns and not is_in_group():
        yield (
            f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), and attached as if it trained alone; "
            "if they train together, call init_process_group before attach"
        )


@contextmanager
def reached() -> Iterator[None]:
    """Raises PeerError where the store of torch.distributed is gone."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise PeerError(f"the other ranks cannot be reached ({why:.200}); see whether rank 0 still runs") from None


def _said(value: object) -> str:
    return f"{value!r:.300}"
