"""The state of a training as a graph has it: what the walk over live tensors finds, each with a role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from checkflow.dtypes import name_of
from checkflow.errors import InputError, TraceError
from checkflow.extra import Holder
from checkflow.graph import Role
from checkflow.state import refused
from checkflow.state.divided import elsewhere
from checkflow.state.live import Live, asked_state, live_state, parameter_names
from checkflow.state.names import StateName
from checkflow.training import Training


@dataclass(frozen=True, slots=True)
class TracedState:
    """One name of a state tensor."""

    name: StateName
    role: Role
    tensor: torch.Tensor
    host: bool  # on the host, whatever the device: never crosses the link
    may_change: bool = False  # in shape, or not be there: a dict of the user's holds it
    of: str = ""  # an optimizer's entry: the name of its parameter
    elsewhere: bool = False  # another rank saves it


def state_of(training: Training, model: str) -> tuple[TracedState, ...]:
    """Every name of every state tensor. Raises TraceError for what cannot be checkpointed, as attach would.

    Of the objects that were listed only dicts are known here: what state_dict() gives may be copies.
    """
    try:
        return tuple(live_states(training))
    except InputError as error:
        raise TraceError(f"{model}: {error}") from None


def live_states(training: Training) -> Iterator[TracedState]:
    """The same. Raises InputError."""
    lives, names = live_state(training), parameter_names(training)
    refused.device_of(live.tensor for live in lives)
    others = elsewhere(training, lives)
    for live in lives:
        if not live.is_host_scalar_anywhere:
            refused.check_dtype(live.name, name_of(live.tensor.dtype))
        of = "" if live.parameter is None else str(names.get(id(live.parameter), ""))
        yield TracedState(
            live.name, _role(live), live.tensor, live.is_host_scalar_anywhere, of=of, elsewhere=live.name in others
        )
    dicts = {holder: member for holder, member in training.listed.objects.items() if isinstance(member, Holder)}
    for name, tensor in asked_state(dicts):
        refused.check_stored(name, tensor)
        refused.check_dtype(name, name_of(tensor.dtype))
        yield TracedState(name, Role.BUFFER, tensor, host=False, may_change=True)


def _role(live: Live) -> Role:
    """What no optimizer updates, whatever the user calls it, has the role of a buffer."""
    if live.optimizer is not None:
        return Role.OPTIMIZER
    return Role.BUFFER if live.buffer or live.name.is_extra else Role.PARAMETER
