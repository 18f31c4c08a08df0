"""A StatefulDataLoader whose samplers are told epochs: with them its position is whole.

torchdata draws a pass's order where it makes its iterator, which it does to give its state, too: by the epoch of then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkflow.epochs import epochs_of, note_epochs, tell_epochs, told_in
from checkflow.extra import Stateful
from checkflow.state.host.rng import RngReader, RngRecord, match_rng
from checkflow.state.host.samplers import draws_itself, generators_of
from checkflow.torch_internals import loader_iterator

_PASS = "pass"  # what is added to the loader's own state


def with_epochs(loader: Stateful) -> Stateful:
    """The same, but for a StatefulDataLoader that has samplers with set_epoch."""
    if not draws_itself(loader):
        return loader
    told = told_in(order_of(loader))
    return EpochLoader(loader, told) if told else loader


def order_of(loader: Any) -> Any:
    """What says which items it gives next."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def own_type(member: Stateful) -> str:
    """The name of the type of what the user attached."""
    return type(member.loader if isinstance(member, EpochLoader) else member).__name__


class EpochLoader:
    """Gives a loader's state with its samplers' epochs, and tells them before torchdata makes its iterator.

    While no pass has begun none is made: set_epoch may still be called.
    """

    def __init__(self, loader: Any, told: Mapping[str, Any]) -> None:
        self.loader = loader
        self._told = told
        note_epochs(told)

    def state_dict(self) -> dict[str, object]:
        begun = loader_iterator(self.loader) is not None
        state = self.loader.state_dict() if begun else self._before_it_began()
        return {**state, _PASS: {"begun": begun, "epochs": epochs_of(self._told)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found = state_dict.get(_PASS, {"begun": True, "epochs": {}})  # there is none from before it was kept
        tell_epochs(self._told, found["epochs"])
        self.loader.next_iter_state = None  # an empty state leaves it
        self.loader.load_state_dict({key: value for key, value in state_dict.items() if key != _PASS})
        if found["begun"]:
            self.loader.state_dict()  # makes the iterator, and draws for it, before generators are set

    def _before_it_began(self) -> dict[str, object]:
        """Nothing is changed by it."""
        waiting = self.loader.next_iter_state or {}
        generators = generators_of(order_of(self.loader))
        if not generators and not any(isinstance(one, Stateful) for one in (self.loader.dataset, *self._told.values())):
            return dict(waiting)  # there is nothing but what the user had it load, and no worker needs to be started
        own = {**generators, **({"": self.loader.generator} if self.loader.generator is not None else {})}
        before = RngReader().read(own)
        state: dict[str, object] = self.loader.state_dict()
        self.loader.load_state_dict(waiting)
        match_rng(RngRecord.model_validate_json(before), own).restore()
        return state
