"""A schedule as it fits the live training: what is bound, which files it goes to, and what reads the host's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checkflow.checkpointing.earlier import of_now
from checkflow.checkpointing.files import layouts_of
from checkflow.checkpointing.listing import unplanned
from checkflow.errors import InputError, StoreError
from checkflow.learning.learner import Learner
from checkflow.runtime.binding import Binding, add_gradient_rooms, add_rooms
from checkflow.runtime.matching import bind, check_rebuilt
from checkflow.schedule import Schedule
from checkflow.state.host.capture import HostState, check_capturable
from checkflow.state.host.objects import HostObjects
from checkflow.state.host.tensors import in_files
from checkflow.store.format.layout import Layout
from checkflow.store.memory.room import Room
from checkflow.training import Training


@dataclass(frozen=True)
class Fitting:
    """One schedule and one training, at one moment."""

    schedule: Schedule
    binding: Binding
    layouts: tuple[Layout, ...]  # of the slots of each lane
    host: HostState

    def fits(self, layouts: Sequence[Layout]) -> bool:
        """Whether slots of these layouts will do."""
        return [layout.files for layout in self.layouts] == [layout.files for layout in layouts]

    def room(self, slots: int) -> Room:
        """What so many slots of it take."""
        all_slots, record_bytes = slots * len(self.layouts), self.host.room_bytes()
        return Room.of(self.layouts, slots=all_slots, record_room_bytes=record_bytes, config_bytes=0)


def fit(schedule: Schedule, training: Training, objects: HostObjects) -> Fitting:
    """Raises InputError for what the schedule and the training differ in, and for what cannot be saved."""
    schedule = of_now(schedule, training)
    binding = bind(schedule, training)
    check_rebuilt(schedule, training)
    add_rooms(binding, in_files(objects.objects))
    add_gradient_rooms(binding, schedule)
    targets = binding.targets.values()
    host = HostState(
        training,
        objects,
        stored={target.name for target in targets}.__contains__,
        fingerprints={"schedule": schedule.digest, "state": schedule.state_fingerprint},
        rooms={
            target.name: (getattr(torch, target.dtype), target.shape)
            for target in targets
            if target.name.holder in objects.objects
        },
        tied_in_files={target.name: target.alias_of for target in targets if target.alias_of is not None},
    )
    layouts = layouts_of(binding, schedule.slot_lanes)
    check_capturable(host)
    return Fitting(schedule, binding, layouts, host)


def kept_still(learner: Learner, training: Training, objects: HostObjects, slots: int) -> Fitting | None:
    """What an earlier run has learned; None where that is nothing, or no longer of this training.

    Raises InputError for what cannot be saved, whatever the schedule.
    """
    if learner.kept is None:
        return None
    try:
        fitting = fit(learner.kept, training, objects)
        if learner.kept.slot_lanes > 1:
            fitting.room(slots).check()
        if not (why := unplanned(learner.kept, training.listed)):
            return fitting
    except InputError as error:
        why = str(error)
    except StoreError as error:
        learner.without_parts(str(error), factored=False)
        return None
    fit(learner.provisional(), training, objects)  # what is refused there, too, is no reason to learn anew
    learner.anew(why)
    return None
