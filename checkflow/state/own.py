"""What an optimizer keeps in its state under a text, for itself and not of a parameter: a count of all its updates.

torch's own state_dict() and load_state_dict() carry such entries, too. Within one, a key may be a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch

from checkflow.state import refused
from checkflow.state.names import StateName
from checkflow.wrapped import is_zero, updater


def state_of(optimizer: torch.optim.Optimizer) -> dict[object, object]:
    """All its state, by keys of any kind."""
    return cast(dict[object, object], updater(optimizer).state)


def own_of(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What there is now, by its text."""
    return {key: value for key, value in state_of(optimizer).items() if type(key) is str}


def own_entries(
    holder: str, optimizer: torch.optim.Optimizer, names: Mapping[int, StateName]
) -> Iterator[tuple[StateName, torch.Tensor, object, object]]:
    """Each tensor of it with its name, and where it is held: container[key]. `names`: of parameters, by identity.

    Raises InputError where nothing says which ranks have it.
    """
    for key, value in own_of(optimizer).items():
        if is_zero(optimizer):
            raise refused.divided_own(where_of(holder, optimizer), key)
        name = StateName.of_own(holder, key)
        yield from _tensors(value, name, state_of(optimizer), key, optimizer, names)


def _tensors(
    value: object,
    name: StateName,
    container: object,
    key: object,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, StateName],
) -> Iterator[tuple[StateName, torch.Tensor, object, object]]:
    if isinstance(value, torch.Tensor):
        yield name, value, container, key
    elif isinstance(value, dict):
        for inner, item in value.items():
            yield from _tensors(
                item, name.inside(key_name(inner, name.holder, optimizer, names)), value, inner, optimizer, names
            )
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, name.inside(index), value, index, optimizer, names)


def where_of(holder: str, optimizer: torch.optim.Optimizer) -> str:
    """For messages: the state, and whose it is."""
    return f"{holder}.state of {kind_of(optimizer)}"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    return type(updater(optimizer)).__name__


def key_name(key: object, holder: str, optimizer: torch.optim.Optimizer, names: Mapping[int, StateName]) -> object:
    """What a key of a dict is called: of a parameter, its name. Raises InputError for another tensor."""
    if not isinstance(key, torch.Tensor):
        return key
    if id(key) not in names:
        raise refused.stray_state(holder, kind_of(optimizer), key)
    return names[id(key)]
