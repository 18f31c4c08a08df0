"""No staged checkpoint is torn, whatever the schedule says and however late the copies run."""

from __future__ import annotations

import pytest
import small_trainings as trainings
from torn import Factory, random_schedule, rig

from checkflow.runtime.binding import BoundStorage
from checkflow.runtime.guards import GuardKind


@pytest.mark.parametrize("factory", trainings.ALL, ids=lambda factory: factory.__name__)
@pytest.mark.parametrize(("lag", "few_bytes"), [(0, 0), (3, 0), (10**9, 0), (0, 10**9), (3, 10**9), (10**9, 500)])
@pytest.mark.parametrize("seed", range(3))
def test_every_staged_byte_is_of_its_iterations_end(factory: Factory, lag: int, few_bytes: int, seed: int) -> None:
    """Random places for every action, apart or together, copies at once, late, or only when waited for."""
    schedule = random_schedule(factory, seed)
    made = rig(factory, schedule, lag=lag, few_bytes=few_bytes)
    made.run(8)
    made.close()
    assert made.torn() == []
    assert made.sink.order == list(range(1, 9))


@pytest.mark.parametrize("factory", trainings.ALL, ids=lambda factory: factory.__name__)
@pytest.mark.parametrize("lag", [0, 10**9])
def test_a_pause_anywhere_tears_nothing(factory: Factory, lag: int) -> None:
    """Whatever it finds issued or not, and whether its anchor fires or does not."""
    schedule = random_schedule(factory, 3)
    for pause in ((0, 1), (0, len(schedule.anchors)), (1, 1), (1, len(schedule.anchors) // 2), (2, 1)):
        made = rig(factory, schedule.model_copy(update={"pause": pause}), lag=lag)
        made.run(6)
        made.close()
        assert made.torn() == []
        assert made.sink.order == list(range(1, 7))


@pytest.mark.parametrize("factory", [trainings.adamw_foreach, trainings.momentum_foreach, trainings.adamw_fused])
@pytest.mark.parametrize("lag", [0, 3, 10**9])
def test_functions_that_count_no_writes_tear_nothing(
    factory: Factory, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused ones count none, and on CUDA neither do `_foreach_lerp_` and `_foreach_zero_`."""
    monkeypatch.setattr(BoundStorage, "version", lambda storage: (storage.serial, storage.epoch))
    for seed in range(6):
        made = rig(factory, random_schedule(factory, seed), lag=lag)
        made.run(8)
        made.close()
        assert made.torn() == [] and made.sink.order == list(range(1, 9))


@pytest.mark.parametrize("lag", [0, 3, 10**9])
def test_what_is_written_unseen_inside_an_update_costs_one_checkpoint(lag: int) -> None:
    """And only one: that optimizer's update is waited for from then on."""
    factory, lost = trainings.meddling, 0
    for seed in range(6):
        made = rig(factory, random_schedule(factory, seed), lag=lag)
        made.run(12)
        made.close()
        assert made.torn() == []
        assert len(made.sink.order) >= 11
        lost += 12 - len(made.sink.order)
    assert lost > 0, "no case in which it mattered"


def test_what_left_early_does_not_overwrite_what_lies_otherwise_by_then() -> None:
    """Copies from snapshots of a tensor that is replaced, in another memory order, before the iteration's end."""
    for seed in range(12):
        made = rig(trainings.turning, random_schedule(trainings.turning, seed, snapshots=1.0))
        made.run(8)
        made.close()
        assert made.torn() == [] and made.sink.order == list(range(1, 9))
        assert "optimizer/0.weight.basis" in made.executor.bound.loose


def test_another_tensor_at_an_address_that_a_slot_knows_is_read_again() -> None:
    """Three slots, three tensors: each slot meets the same address each time."""
    made = rig(trainings.taking_turns, random_schedule(trainings.taking_turns, 0), lag=0)
    made.run(10)
    made.close()
    assert made.torn() == [] and made.sink.order == list(range(1, 11))


def test_what_an_optimizer_without_hooks_holds_is_waited_for() -> None:
    """Whether the traced iteration writes it or not; with hooks it is not."""
    for factory, waited in ((trainings.wrapping, True), (trainings.hooked_wrapping, False)):
        made = rig(factory, random_schedule(factory, 0))
        made.run(4)
        made.close()
        names = {storage.name for storage in made.executor.bound.unwatched}
        assert ("optimizer.1/0.weight.slow" in names) is waited


TEETH = [
    (GuardKind.OPTIMIZER, trainings.adamw_fused, 10**9),
    (GuardKind.OPTIMIZER, trainings.adamw_foreach, 10**9),
    (GuardKind.OPTIMIZER, trainings.in_backward, 10**9),
    (GuardKind.FORWARD, trainings.sgd, 10**9),
    (GuardKind.UNWATCHED, trainings.averaging, 10**9),
    (GuardKind.REWRITE, trainings.accumulating, 0),
    (GuardKind.LOAD, trainings.reloading, 10**9),
]


@pytest.mark.parametrize(("kind", "factory", "lag"), TEETH, ids=lambda value: getattr(value, "__name__", str(value)))
def test_without_one_kind_of_guard_a_checkpoint_is_torn(kind: GuardKind, factory: Factory, lag: int) -> None:
    """Each kind of guard is needed, and these tests see it when it is missing."""

    def torn(disarmed: frozenset[GuardKind]) -> bool:
        for seed in range(4):
            made = rig(factory, random_schedule(factory, seed, snapshots=0.0), lag=lag, disarmed=disarmed)
            made.run(8)
            made.close()
            if made.torn():
                return True
        return False

    assert not torn(frozenset())
    assert torn(frozenset({kind}))
