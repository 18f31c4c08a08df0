"""How often, and how long: the settings and what they decide."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from small_store import SMALL, TINY, silent, stage

from checkflow.errors import InputError, StoreError
from checkflow.store.both.config import SaverConfig
from checkflow.store.format.reader import Checkpoint, list_checkpoints
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import Pace, PersistEvery


@pytest.mark.parametrize(
    ("every", "iterations", "due"),
    [
        (PersistEvery(iterations=1), [1, 2, 3], [1, 2, 3]),
        (PersistEvery(iterations=3), [1, 2, 3, 4, 5, 6, 7], [3, 6]),
        (PersistEvery(iterations=3), [2, 4, 8, 11], [4, 8, 11]),
        (PersistEvery(iterations=100), [250, 299, 301], [250, 301]),
    ],
)
def test_pace_in_iterations(every: PersistEvery, iterations: list[int], due: list[int]) -> None:
    """At each multiple, or at the first staged iteration after it."""
    pace = Pace(every)
    assert [iteration for iteration in iterations if pace.due(iteration, 0.0, 0.0)] == due


@pytest.mark.parametrize(("restored", "due"), [(9, 12), (18, 21), (20, 32), (27, 30)])
def test_no_multiple_is_passed_over_after_a_restore(restored: int, due: int) -> None:
    """Nor is one that is behind it: lives that are short each time persist all the same."""
    pace = Pace(PersistEvery(iterations=10))
    assert pace.due(40, 0.0, 0.0)  # of a life, or an attempt, that is over
    pace.restored(restored)
    assert next(now for now in range(restored + 3, 100, 3) if pace.due(now, 0.0, 0.0)) == due


def test_who_begins_anew_with_nothing_restored_waits_for_no_earlier_attempt() -> None:
    """As ranks do that have no checkpoint in common."""
    pace = Pace(PersistEvery(iterations=10))
    assert pace.due(40, 0.0, 0.0)
    assert [now for now in range(1, 31) if pace.due(now, 0.0, 0.0)] == [10, 20, 30]


def test_a_store_knows_what_was_restored_whatever_slots_it_has(tmp_path: Path) -> None:
    """Every tenth iteration is due, or the first one after it; other slots go on where those before them were."""
    every = PersistEvery(iterations=10)
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=every) as first:
        assert stage(first, SMALL, 9)
    (nine,) = list_checkpoints(tmp_path)
    assert isinstance(nine, Checkpoint)
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=every)
    assert handle._pace.due(11, 0.0, 0.0)  # of an attempt that is given up
    handle.restored(nine)
    assert handle._pace.due(12, 0.0, 0.0) and not handle._pace.due(18, 0.0, 0.0)
    with StoreHandle.open(tmp_path, [TINY], after=handle, notify=silent, persist_every=every) as other:
        assert not other._pace.due(19, 0.0, 0.0) and other._pace.due(20, 0.0, 0.0)


def test_pace_in_seconds() -> None:
    """The first at once; then by the clock, and by default at most a tenth of the time, within bounds."""
    pace = Pace(PersistEvery(seconds=2))
    assert [now for now in range(8) if pace.due(now, float(now), 0.0)] == [0, 2, 4, 6]
    pace = Pace(PersistEvery())
    assert [now for now in range(100) if pace.due(now, float(now), 1.0)] == [0, 30, 60, 90]
    pace = Pace(PersistEvery())
    assert [now for now in range(500) if pace.due(now, float(now), 20.0)] == [0, 200, 400]
    pace = Pace(PersistEvery())
    assert [now for now in range(2000) if pace.due(now, float(now), 300.0)] == [0, 600, 1200, 1800]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PersistEvery(iterations=0),
        lambda: PersistEvery(seconds=-1),
        lambda: PersistEvery(seconds=float("nan")),
        lambda: PersistEvery(iterations=1, seconds=1),
        lambda: PersistEvery(iterations=2.5),  # type: ignore[arg-type]
        lambda: PersistEvery(seconds="5"),  # type: ignore[arg-type]
        lambda: Retention(last=0),
        lambda: Retention(every=0),
        lambda: Retention(last=2.5),  # type: ignore[arg-type]
        lambda: Retention(last=None),  # type: ignore[arg-type]
        lambda: Retention(every="3"),  # type: ignore[arg-type]
        lambda: Retention(every=float("nan")),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        wrong()


@pytest.mark.parametrize("seconds", [float("nan"), True, "5"])
def test_what_is_no_number_is_not_called_negative(seconds: float) -> None:
    with pytest.raises(InputError, match=f"persist_every: seconds: {seconds!r} is no number; give 0 or more"):
        PersistEvery(seconds=seconds)


def test_a_fraction_of_a_second_is_told_as_any_other_time() -> None:
    assert PersistEvery(seconds=Fraction(1, 4)).in_words() == "each 0.25 s"  # type: ignore[arg-type]


def test_a_saver_says_what_of_its_configuration_it_cannot_read(tmp_path: Path) -> None:
    """In the last line of what it writes, which its trainer tells."""
    whole = SaverConfig(tmp_path, (SMALL.specs,), Retention(), {}).dump()
    for wrong, says in (
        (whole.replace(b'"last":2', b'"last":' + b"9" * 5000), " cannot be read: Invalid JSON: number out of range"),
        (whole.replace(b'"last":2', b'"last":"x"'), "its configuration retention last cannot be read: "),
    ):
        with pytest.raises(StoreError, match=r"^its configuration") as caught:
            SaverConfig.parse(wrong)
        assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_other_kinds_of_numbers_are_whole_too() -> None:
    """Half of an even number of batches, and NumPy's; a saver is told them as its own."""
    retention = Retention(np.int64(3), 100 / 2)  # type: ignore[arg-type]
    assert (retention, repr(retention)) == (Retention(3, 50), "Retention(last=3, every=50)")
    assert repr(PersistEvery(iterations=np.int32(4))) == repr(PersistEvery(iterations=4))  # type: ignore[arg-type]


def test_what_a_saver_could_not_read_is_given_to_none(tmp_path: Path) -> None:
    """It would die of it, and so would each that follows."""
    retention = Retention()
    object.__setattr__(retention, "every", 2.5)
    with pytest.raises(ValueError, match="every"):
        SaverConfig(tmp_path, (SMALL.specs,), retention, {}).dump()
