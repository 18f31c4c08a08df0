"""The one walk over the live tensors of a training: all that a resume needs, under the names that a schedule uses.

Parameters and buffers as in state_dict, optimizer state as <parameter>.<entry>. Non-persistent buffers are no state: a
resume builds them again. What a dict or an object holds that was listed as extra is not bound: it is asked for when an
iteration ends. A compiled model has the names of the one that was compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from checkflow.errors import InputError
from checkflow.extra import TENSOR, Extra, Stateful, module_tensors, tensors_of
from checkflow.state import refused
from checkflow.state.groups import read_scalars
from checkflow.state.holders import models_of, optimizers_of, unwrapped
from checkflow.state.names import StateName, in_state_dict, stems
from checkflow.state.own import own_entries, own_of
from checkflow.state.shards import is_shared, local
from checkflow.torch_internals import own_buffers, own_parameters
from checkflow.training import Training
from checkflow.wrapped import updated_here, updater


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """One name of a state tensor, and where it is held: container[key].

    `held` is what is there, `tensor` its bytes: of one that ranks share, this rank's part.
    """

    name: StateName
    held: torch.Tensor
    container: object
    key: object
    module: torch.nn.Module | None = None  # that owns a parameter or buffer
    buffer: bool = False
    optimizer: int | None = None  # which optimizer's state
    parameter: torch.nn.Parameter | None = None  # that an optimizer's entry belongs to
    for_kernels: bool = False  # of an optimizer whose kernels read its scalars: on CUDA they are there
    tensor: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", local(self.held))

    @property
    def entry(self) -> str:
        """Of an optimizer's state, which kind of it: "exp_avg"; "" for what is none."""
        if self.optimizer is None:
            return ""
        return ".state" if self.name.is_own else str(self.key)  # its key may be a parameter

    @property
    def is_host_scalar(self) -> bool:
        """Adam's step and its like: one CPU element of an optimizer. Where no file has it the host's record does."""
        return self.optimizer is not None and self.tensor.device.type == "cpu" and self.tensor.dim() == 0

    @property
    def is_host_scalar_anywhere(self) -> bool:
        """Whether it is one on a machine with CUDA, too. Then no schedule has it."""
        return self.is_host_scalar and not self.for_kernels

    @property
    def moved(self) -> bool:
        """Whether the container now holds another tensor, or none."""
        return not is_held(self.container, self.key, self.held)


def held_in(training: Training) -> Iterator[tuple[object, object, object]]:
    """What leads to the containers of optimizers' state, from the top: (holder, key, what it holds). Where one holds
    another thing than it did, there may be other state."""
    for optimizer in map(updater, training.optimizers):
        state, groups = optimizer.state, optimizer.param_groups
        for name in ("state", "param_groups"):
            yield vars(optimizer), name, vars(optimizer).get(name)
        for index, group in enumerate(groups):
            yield groups, index, group
            for parameter in group["params"]:
                if (its := state.get(parameter)) is not None:
                    yield state, parameter, its
                    yield from _nested(its)
        yield from _nested(own_of(optimizer), state)


def _nested(state: object, holder: object = None) -> Iterator[tuple[object, object, object]]:
    """`holder`: of which the state is a part."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield state if holder is None else holder, key, item
            yield from _nested(item)


def is_held(holder: object, key: object, held: object) -> bool:
    """Whether it still is there."""
    if isinstance(holder, dict):
        return holder.get(key) is held
    return isinstance(holder, (list, tuple)) and isinstance(key, int) and key < len(holder) and holder[key] is held


def live_state(training: Training) -> list[Live]:
    """What the walk finds. Raises InputError for what cannot be checkpointed, by name."""
    found = list(walk(training))
    for live in found:
        refused.check_tensor(live.name, live.tensor)
        if live.optimizer is None:
            refused.check_dense(live.name, live.tensor)
            refused.check_block(live.name, live.held)
        if live.parameter is not None:
            refused.check_shared_alike(live.name, live.held, live.parameter)
        elif live.name.is_own:
            refused.check_own(live.name, live.held)
    if len({live.name for live in found}) < len(found):
        name, _ = Counter(live.name for live in found).most_common(1)[0]
        raise InputError(f"{name}: two tensors of this training have that name; rename one")
    return found


def walk(training: Training) -> Iterator[Live]:
    """Every name of every tensor that exists now and is bound: of models, of optimizers, of what is listed.

    Graphs and attached trainings have their names from here, so that one is found in the other. Raises InputError for
    state of an optimizer that no name leads to.
    """
    yield from in_models(training)
    yield from _in_optimizers(training)
    yield from listed_state(training.listed)


def in_models(training: Training) -> Iterator[Live]:
    """Of the walk: parameters and buffers of models."""
    return _in_modules(models_of(training))


def listed_state(listed: Extra) -> Iterator[Live]:
    """Of the walk: modules and tensors that were listed beside models and optimizers."""
    yield from _in_modules(listed.modules)
    for holder, tensor in listed.tensors.items():
        yield Live(StateName.of(holder, TENSOR), tensor, listed.tensors, holder)


def asked_state(objects: Mapping[str, Stateful]) -> Iterator[tuple[StateName, torch.Tensor]]:
    """What the walk does not reach: tensors that objects have when they are asked for their state, by name."""
    for holder, member in objects.items():
        for path, tensor in tensors_of(member).items():
            yield StateName.of(holder, path), tensor


def parameters_of(training: Training) -> Iterator[tuple[StateName, torch.nn.Parameter]]:
    """("model/features.0.weight", parameter) for each parameter of the models once, under its first name."""
    seen: set[int] = set()
    for holder, model in models_of(training).items():
        for path, parameter in unwrapped(model).named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield StateName.of(holder, in_state_dict(path)), parameter


def has_shared(training: Training) -> bool:
    """Whether ranks share tensors of it (DTensor): FSDP2, tensor parallelism."""
    return any(is_shared(parameter) for _, parameter in parameters_of(training))


def parameter_names(training: Training) -> dict[int, StateName]:
    """id(parameter) -> its first name."""
    return {id(parameter): name for name, parameter in parameters_of(training)}


def entry_stems(training: Training) -> tuple[dict[StateName, torch.nn.Parameter], ...]:
    """For each optimizer: what the names of its entries begin with, for each of its parameters that a model has."""
    names = parameter_names(training)
    found: list[dict[StateName, torch.nn.Parameter]] = []
    for holder, optimizer in optimizers_of(training).items():
        updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
        parameters = {names[id(parameter)]: parameter for parameter in updated if id(parameter) in names}
        found.append({stem: parameters[name] for name, stem in stems(holder, parameters).items()})
    return tuple(found)


def kept_here(training: Training) -> dict[str, frozenset[StateName]]:
    """By optimizer: the parameters whose state this rank keeps."""
    names = parameter_names(training)
    return {
        holder: frozenset(names[id(parameter)] for parameter in updated_here(optimizer) if id(parameter) in names)
        for holder, optimizer in optimizers_of(training).items()
    }


def entries(state: object, stem: StateName) -> Iterator[tuple[StateName, torch.Tensor, object, object]]:
    """A parameter's optimizer state: each tensor with its name, and where it is held: container[key]."""
    items: list[tuple[object, object]] = []
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, (list, tuple)):
        items = list(enumerate(state))
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield stem.inside(key), item, state, key
        else:
            yield from entries(item, stem.inside(key))


def _in_modules(modules: Mapping[str, torch.nn.Module]) -> Iterator[Live]:
    for holder, whole in modules.items():
        for path, module, name, buffer in module_tensors(unwrapped(whole)):
            held = own_buffers(module) if buffer else own_parameters(module)
            tensor = held[name]
            assert tensor is not None
            yield Live(StateName.of(holder, in_state_dict(path)), tensor, held, name, module, buffer)


def _in_optimizers(training: Training) -> Iterator[Live]:
    by_stem, names = entry_stems(training), parameter_names(training)
    for number, (holder, optimizer) in enumerate(optimizers_of(training).items()):
        stem = {id(parameter): name for name, parameter in by_stem[number].items()}
        for index, group in enumerate(optimizer.param_groups):
            for_kernels = read_scalars(group)
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    name = StateName.of_group(holder, index, key)
                    yield Live(name, value, group, key, optimizer=number, for_kernels=for_kernels)
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in stem:
                    known = (found for _, found in parameters_of(training))
                    raise refused.stray_parameter(holder, index, position, parameter, known)
                state = updater(optimizer).state.get(parameter, {})
                if not isinstance(state, Mapping):
                    raise refused.no_entries(stem[id(parameter)], state)
                for name, tensor, where, entry in entries(state, stem[id(parameter)]):
                    yield Live(
                        name, tensor, where, entry, optimizer=number, parameter=parameter, for_kernels=for_kernels
                    )
        for_kernels = any(map(read_scalars, optimizer.param_groups))
        for name, tensor, where, entry in own_entries(holder, optimizer, names):
            yield Live(name, tensor, where, entry, optimizer=number, for_kernels=for_kernels)
