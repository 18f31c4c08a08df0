"""What a person is told of state beside what models and optimizers list when a training is attached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from checkflow.extra import Extra, Holder, added_entries, key_of
from checkflow.schedule import Schedule
from checkflow.state.live import asked_state, listed_state
from checkflow.state.names import StateName
from checkflow.unlisted import Unlisted, lines_of

_ADVICE = "list it: attach(extra={...})"


def carried(schedule: Schedule) -> tuple[Unlisted, ...]:
    """What the iteration that a schedule was made from hands on to the next and does not list."""
    return tuple(Unlisted(row.name, row.bytes, row.where, row.scaler) for row in schedule.unlisted)


def missing(found: Iterable[Unlisted], extra: Extra, *, scaler: bool) -> tuple[str, ...]:
    """What an iteration carries and the attached training does not list, a line for each place.

    It counts as listed where a part of its name is a key of `extra`, or a tensor there has its size.
    """
    keys = {key_of(holder) for holder in extra.holders}
    sizes = Counter(tensor.numel() * tensor.element_size() for tensor in _tensors(extra).values())
    left: list[Unlisted] = []
    for one in found:
        if sizes[one.size_bytes]:
            sizes[one.size_bytes] -= 1
        elif not (one.scaler and scaler) and keys.isdisjoint(one.name.split(".")):
            left.append(one)
    return lines_of(left, _ADVICE)


def added(models: Mapping[str, torch.nn.Module], extra: Extra) -> Iterator[str]:
    """What the code of a model's modules adds to its state_dict and `extra` does not list, a line for each model."""
    listed = {id(member) for member in extra.objects.values()}
    for holder, model in models.items():
        paths = tuple(f"{path}." for path, module in model.named_modules() if id(module) in listed)
        if keys := [key for key in added_entries(model) if not key.startswith(paths)]:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            yield (
                f"{holder}: its state_dict() gives {keys[0]!r}{more}, no parameter or buffer, and in no checkpoint; "
                "list the module that has it: attach(extra={...})"
            )


def drawn_by_cudnn(models: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Recurrent layers that drop out by a state which cuDNN keeps for itself, a line for each model that has some."""
    if not torch.backends.cudnn.enabled:
        return
    for holder, model in models.items():
        layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, torch.nn.RNNBase)}
        drops = [path for path, layer in layers.items() if layer.dropout and layer.num_layers > 1]
        if found := [f"{holder}/{path}" for path in drops if next(layers[path].parameters()).is_cuda]:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield (
                f"{found[0]}{more}: cuDNN draws its dropout from a state that nobody can read, so a resumed run draws "
                "otherwise; put nn.Dropout between layers of one each, or set torch.backends.cudnn.enabled = False"
            )


def unplanned(schedule: Schedule, extra: Extra) -> str | None:
    """Of modules, tensors and dicts that are listed: those that the schedule does not know."""
    planned = {StateName(view.name).holder for row in schedule.state for view in row.views}
    asked = {holder for holder, member in extra.objects.items() if not isinstance(member, Holder)}
    holders = {name.holder for name in _tensors(extra)} - planned - asked
    if not holders:
        return None
    return (
        f"{', '.join(sorted(holders))}: not in the schedule, so read when each iteration ends, which training waits "
        "for; to have it planned, list it in Training(extra={...}) and compile again"
    )


def _tensors(extra: Extra) -> Mapping[StateName, torch.Tensor]:
    return {live.name: live.tensor for live in listed_state(extra)} | dict(asked_state(extra.objects))
