"""Ranks are cut off, each at any operation of its own commit: what all have is the old or the new one, never mixed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from recording_disk import Event, RecordingDisk, State, Told
from small_store import TINY, InProcess, is_whole
from test_store_powercut import build

from checkflow.errors import CorruptStoreError
from checkflow.store.both.messages import DurableReport, Message, VerifiedReport
from checkflow.store.format.ranks import directory_of
from checkflow.store.format.reader import SkippedCheckpoint, list_checkpoints, load
from checkflow.store.format.retention import Retention

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CUTS = 20_000 if NIGHTLY else 400
STATES = 8  # of a device at a cut
ITERATIONS = (1, 2, 3)


@dataclass(frozen=True)
class ReadBack:
    """The saver said that an iteration is verified."""

    iteration: int


@dataclass(frozen=True)
class Heard:
    """Each rank has read back its part of it: what is older may be pruned."""

    iteration: int


class RankDisk(RecordingDisk):
    """A rank's, with what its saver says and hears among the operations."""

    events: list[Event | ReadBack | Heard]  # type: ignore[assignment]


def record(store: Path) -> RankDisk:
    """A rank's saver persists three checkpoints. Of each it hears, in time for the next, that all have verified it."""
    disk = RankDisk(store)

    def told(message: Message) -> None:
        if isinstance(message, DurableReport):
            disk.told(message.iteration)
        if isinstance(message, VerifiedReport):
            disk.events.append(ReadBack(message.iteration))

    saver = InProcess(store, TINY, disk, Retention(last=1), told, grouped=True)
    for sequence, iteration in enumerate(ITERATIONS, start=1):
        saver.persist(iteration)
        disk.events.append(Heard(iteration))
        saver.persister.agree(sequence)
    saver.close()
    return disk


def can_be(disk: RankDisk, cuts: Sequence[int]) -> bool:
    """Whether no rank has heard yet of what another one has not said."""
    prefixes = [disk.events[:cut] for cut in cuts]
    return all(
        ReadBack(event.iteration) in other
        for prefix in prefixes
        for event in prefix
        if isinstance(event, Heard)
        for other in prefixes
    )


def cuts_of(disk: RankDisk, size: int) -> Iterator[tuple[int, ...]]:
    """Where each rank is cut off: all ways that can be where these are few, else some that are drawn."""
    every = range(len(disk.events) + 1)
    if len(every) ** size <= CUTS:
        yield from filter(lambda cuts: can_be(disk, cuts), itertools.product(every, repeat=size))
        return
    choose, found = random.Random(size), set[tuple[int, ...]]()
    while len(found) < CUTS:
        near = choose.randrange(len(every))  # ranks are about as far, but for one
        cuts = [min(max(near + choose.randint(-9, 9), 0), len(every) - 1) for _ in range(size)]
        cuts[choose.randrange(size)] = choose.randrange(len(every))
        if tuple(cuts) not in found and can_be(disk, cuts):
            found.add(tuple(cuts))
            yield tuple(cuts)


def whole_in(store: Path) -> set[int]:
    """The iterations of which a rank's part is what was written."""
    found = set()
    for checkpoint in list_checkpoints(store):
        if isinstance(checkpoint, SkippedCheckpoint):
            continue
        try:
            loaded = load(checkpoint)
        except CorruptStoreError:
            continue
        assert is_whole(loaded, TINY)
        found.add(checkpoint.iteration)
    return found


def durable_in(events: Sequence[object]) -> int:
    return max((event.iteration for event in events if isinstance(event, Told)), default=0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "without power"])
def test_all_have_the_old_one_or_the_new_one(size: int, power: bool, tmp_path: Path, memory_path: Path) -> None:
    disk = record(tmp_path / "store")
    choose, seen, kinds = random.Random(0), 0, set[int]()
    for cuts in cuts_of(disk, size):
        common: set[int] | None = None
        for rank, cut in enumerate(cuts):
            where = memory_path / directory_of(rank, size)
            build(state_of(disk, cut, choose, power=power), where)
            whole = whole_in(where)
            common = whole if common is None else common & whole
            shutil.rmtree(where)
        promised = min(durable_in(disk.events[:cut]) for cut in cuts)
        newest = max(common or {0})
        assert newest >= promised, (cuts, common)
        kinds.add(newest)
        seen += 1
    assert seen >= min(CUTS, 400)
    assert kinds == {0, *ITERATIONS}


def state_of(disk: RankDisk, cut: int, choose: random.Random, *, power: bool) -> State:
    """What is left after so many operations: all of them, or what a device has that lost power."""
    operations = RecordingDisk.__new__(RecordingDisk)
    operations.events = [event for event in disk.events[:cut] if not isinstance(event, (ReadBack, Heard))]
    operations.directories = disk.directories
    if power:
        return choose.choice(list(operations.states(len(operations.events), STATES, choose)))
    return operations._build(operations.events)


def test_the_cut_has_teeth(tmp_path: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank prunes without having heard of the others, ranks are left with nothing in common."""
    monkeypatch.setattr(f"{__name__}.can_be", lambda *_: True)
    with pytest.raises(AssertionError):
        test_all_have_the_old_one_or_the_new_one(2, False, tmp_path, memory_path)
