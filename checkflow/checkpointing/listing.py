"""What a person is told of state beside what models and optimizers list when a training is attached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from checkflow.checkpointing.in_common import in_common
from checkflow.extra import Extra, Holder, Stateful, Variables, added_entries, key_of
from checkflow.schedule import Schedule
from checkflow.state.holders import models_of, optimizers_of, parts_of
from checkflow.state.live import asked_state, listed_state
from checkflow.state.names import StateName, is_of_kind
from checkflow.torch_ranks import hook_states
from checkflow.training import Training
from checkflow.unlisted import Unlisted, hook_line, lines_of
from checkflow.wrapped import added_by, held_by, takes_back

_ADVICE = "list it: attach(extra={...})"
_OWN = 'list it: attach(extra={"own": optimizer})'
_COUNTED = 'list who counts it: attach(extra={"own": checkflow.Variables(vars(...), ...)})'
_SHOWN = 8  # of keys that are named


def carried(schedule: Schedule) -> tuple[Unlisted, ...]:
    """What the iteration that a schedule was made from hands on to the next and does not list."""
    return tuple(Unlisted(row.name, row.bytes, row.where, row.scaler) for row in schedule.unlisted)


def missing(
    found: Iterable[Unlisted], extra: Extra, told: set[str], *, scaler: bool, schedule: Schedule | None = None
) -> tuple[str, ...]:
    """What an iteration carries and the attached training does not list, a line for each place.

    `told`: what was, which is left out; what is new is added.

    Of the training itself that is what was found. A schedule may be of one that listed less: there, something counts as
    listed where a part of its name is a key of `extra`, or a tensor has its size; but not for what the schedule has.
    """
    beside = set() if schedule is None else set(extra.holders) - _planned(schedule)
    keys = {key_of(holder) for holder in beside}
    tensors = [tensor for name, tensor in _tensors(extra).items() if name.holder in beside]
    sizes = Counter(tensor.numel() * tensor.element_size() for tensor in tensors)
    left: list[Unlisted] = []
    for one in found:
        if one.is_gradient:
            left.append(one)
        elif sizes[one.size_bytes]:
            sizes[one.size_bytes] -= 1
        elif not (one.scaler and scaler) and keys.isdisjoint(one.name.split(".")):
            left.append(one)
    new = [one for one in left if (one.name or one.where) not in told]
    told |= {one.name or one.where for one in new}
    return lines_of(new, _ADVICE)


def untaken(training: Training, objects: Mapping[str, Stateful]) -> Iterator[str]:
    """What models and optimizers keep, and none of the attached objects, so that no checkpoint has it: lines."""
    models = models_of(training)
    yield from added(models, training.listed)
    yield from drawn_by_cudnn(models)
    yield from kept_by_hooks(models, training.listed)
    yield from added_by_wrappers(training)
    yield from unscheduled(training, objects)
    yield from in_common(training)


def kept_by_hooks(models: Mapping[str, torch.nn.Module], extra: Extra) -> Iterator[str]:
    """What communication hooks of DistributedDataParallel keep, a line for each."""
    for holder, model in models.items():
        for ddp in (part for part in model.modules() if isinstance(part, torch.nn.parallel.DistributedDataParallel)):
            for state in hook_states(ddp):
                if not extra.takes(state):
                    yield hook_line(holder, state)


def added_by_wrappers(training: Training) -> Iterator[str]:
    """What an optimizer adds to the state of those that it holds, a line for each that does."""
    given = training.optimizer
    for optimizer in (given,) if isinstance(given, torch.optim.Optimizer) else given:
        for wrapper, keys in added_by(optimizer):
            if not any(training.listed.takes(each) for each in (wrapper, *vars(wrapper).values())):
                more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
                others = "what the optimizer in it has" if held_by(wrapper) else "state and param_groups"
                yield (
                    f"{type(wrapper).__name__}: its state_dict() has {', '.join(map(repr, keys[:_SHOWN]))}{more} "
                    f"beside {others}, and no checkpoint does; {_OWN if takes_back(wrapper) else _COUNTED}"
                )


def unscheduled(training: Training, objects: Mapping[str, Stateful]) -> Iterator[str]:
    """Optimizers whose learning rate a scheduler sets that nothing attached is or may have, a line for each."""
    of_schedulers: list[object] = []
    for name, member in objects.items():
        optimizer = getattr(getattr(member, "scheduler", member), "optimizer", None)
        if optimizer is not None:
            of_schedulers += [optimizer, *held_by(optimizer)]
        elif is_of_kind(name, "scheduler") or "last_epoch" in _variables_of(member) or _is_anything(name, member):
            return
    for holder, optimizer in optimizers_of(training).items():
        is_scheduled = any("initial_lr" in group for group in optimizer.param_groups) and "step" in vars(optimizer)
        if is_scheduled and not any(each is optimizer for each in of_schedulers):
            yield (
                f"{holder}: a scheduler sets its learning rate and is not attached, so that a resumed run begins its "
                "schedule anew; give it: attach(scheduler=...)"
            )


def _variables_of(member: Stateful) -> Mapping[str, object]:
    return member.state_dict() if isinstance(member, (Variables, Holder)) else {}


def _is_anything(name: str, member: Stateful) -> bool:
    """Whether it is an object of the user's own, which may have a scheduler."""
    return key_of(name) is not None and type(member).__module__.partition(".")[0] != "checkflow"


def added(models: Mapping[str, torch.nn.Module], extra: Extra) -> Iterator[str]:
    """What the code of a model's modules adds to its state_dict and `extra` does not list, a line for each model."""
    listed = {id(member) for member in extra.objects.values()}
    for holder, model in models.items():
        paths = tuple(f"{path}." for path, module in parts_of(model) if id(module) in listed)
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
        layers = {path: layer for path, layer in parts_of(model) if isinstance(layer, torch.nn.RNNBase)}
        drops = [path for path, layer in layers.items() if layer.dropout and layer.num_layers > 1]
        if found := [f"{holder}/{path}" for path in drops if next(layers[path].parameters()).is_cuda]:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield (
                f"{found[0]}{more}: cuDNN draws its dropout from a state that nobody can read, so a resumed run draws "
                "otherwise; put nn.Dropout between layers of one each, or set torch.backends.cudnn.enabled = False"
            )


def unplanned(schedule: Schedule, extra: Extra) -> str:
    """Of modules, tensors and dicts that are listed: those that the schedule does not know, or ""."""
    asked = {holder for holder, member in extra.objects.items() if not isinstance(member, Holder)}
    holders = {name.holder for name in _tensors(extra)} - _planned(schedule) - asked
    return f"{', '.join(sorted(holders))}: not in the schedule" if holders else ""


def _planned(schedule: Schedule) -> set[str]:
    """Holders of the schedule's state."""
    return {StateName(view.name).holder for row in schedule.state for view in row.views}


def _tensors(extra: Extra) -> Mapping[StateName, torch.Tensor]:
    return {live.name: live.tensor for live in listed_state(extra)} | dict(asked_state(extra.objects))
