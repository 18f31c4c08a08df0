"""What cannot be checkpointed, and why: one list, for what is traced and for what is attached."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator

import torch
from torch.nn.parameter import is_lazy

from checkflow.dtypes import CODES
from checkflow.errors import InputError, ModelFileError, TraceError, shown
from checkflow.spelling import option
from checkflow.state.holders import models_of, modules_of, optimizers_of, parts_of
from checkflow.state.memory import memory_order
from checkflow.state.names import StateName, subject_of
from checkflow.state.shards import are_shared_alike, is_block, is_shared, local
from checkflow.torch_internals import overlaps
from checkflow.training import Training
from checkflow.wrapped import held_by, is_zero, updater

_DISTRIBUTED = {
    "FullyShardedDataParallel": "FSDP",
    "DataParallel": "DataParallel",
    "DeepSpeedEngine": "DeepSpeed",
}  # class -> as people call it
_OF_RANKS = {*_DISTRIBUTED, "DistributedDataParallel", "FSDPModule", "DTensor"}  # what one process does not hold

# Of a training


def check_supported(training: Training) -> None:
    """What is attached. Raises InputError for what is no model or optimizer, or cannot be checkpointed, by name."""
    for holder, reason, _ in _no_parts(training):
        raise InputError(f"{holder}: {reason}")
    for holder, model in modules_of(training).items():
        if (kind := _distributed(model, _DISTRIBUTED)) is not None:
            raise InputError(
                f"{holder}: {_DISTRIBUTED[kind]} is not supported yet; use FSDP2 (fully_shard), "
                "DistributedDataParallel, or one process"
            )


def check_training(value: object, model: str, *, ranks: bool = False) -> Training:
    """What a factory made. Raises ModelFileError, or TraceError for what one process does not hold.

    With `ranks` it was made in the place of one of several.
    """
    if not isinstance(value, Training):
        raise ModelFileError(
            f"{model}: the factory returned {type(value).__name__}; "
            "return checkflow.Training(model, optimizer, iteration)"
        )
    for _, _, reason in _no_parts(value):
        raise ModelFileError(f"{model}: {reason}")
    if not value.models or not value.optimizers:
        raise ModelFileError(f"{model}: the factory returned no {'optimizer' if value.models else 'model'}; give one")
    if not callable(value.iteration):
        kind = type(value.iteration).__name__
        raise ModelFileError(f"{model}: iteration is {kind}; give a function without arguments")
    for is_one, what in (
        (inspect.iscoroutinefunction, "an async function"),
        (inspect.isgeneratorfunction, "a generator, with yield in it"),
    ):
        if is_one(value.iteration):
            raise ModelFileError(f"{model}: iteration is {what}, of which a call runs nothing; give a plain function")
    try:
        modules = modules_of(value)
    except InputError as error:  # `extra` has what cannot be taken
        raise ModelFileError(f"{model}: {error}") from None
    for module in modules.values():
        if (kind := _distributed(module, _DISTRIBUTED if ranks else _OF_RANKS)) is not None:
            if kind in _DISTRIBUTED:
                way = "is not supported yet; use FSDP2 (fully_shard), DistributedDataParallel, or one process"
            else:
                way = f"belongs to several processes; give {option('world_size')}, or trace the plain module of one"
            raise TraceError(f"{model}: {_DISTRIBUTED.get(kind, kind)} {way}")
    return value


def _no_parts(training: Training) -> Iterator[tuple[str, str, str]]:
    """Why something is no model or optimizer that can be checkpointed: after its holder's name, and by itself."""
    several = _are_several(training.model, torch.nn.Module)
    for holder, model in models_of(training).items() if several else [("model", training.model)]:
        if not isinstance(model, torch.nn.Module):
            reason = f"is {type(model).__name__}; give an nn.Module or a list of them"
            yield holder, reason, f"{holder} {reason}"
            continue
        for path, module in parts_of(model):
            if isinstance(module, torch.jit.ScriptModule):
                reason = "is TorchScript, whose code runs without hooks; train the module that was scripted"
                subject = subject_of(holder, path)
                yield subject, reason, f"{subject} {reason}"
    several = _are_several(training.optimizer, torch.optim.Optimizer)
    for holder, optimizer in optimizers_of(training).items() if several else [("optimizer", training.optimizer)]:
        if (text := _no_optimizer(optimizer)) is not None:
            yield holder, text, text


def _are_several(value: object, kind: type) -> bool:
    """Or one, of the right kind, that may hold some."""
    return isinstance(value, kind) or (isinstance(value, Collection) and not isinstance(value, (str, torch.Tensor)))


def _no_optimizer(value: object) -> str | None:
    if is_zero(value) and overlaps(value):
        return (
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates parameters within the backward pass, where nothing "
            "can be read before; leave overlap_with_ddp=False"
        )
    if is_zero(value) and any(is_shared(parameter) for group in value.param_groups for parameter in group["params"]):
        return "ZeroRedundancyOptimizer of parameters that are sharded (DTensor) is not supported; use the one in it"
    if isinstance(updater(value) if is_zero(value) else value, torch.optim.LBFGS):
        return "LBFGS keeps lists of tensors that grow and shrink, which no schedule can plan; use another optimizer"
    if isinstance(value, torch.optim.Optimizer):
        return None
    held = " and ".join(type(found).__name__ for found in held_by(value))
    holds = f" (it holds {held}: give that, if its state is all)" if held else ""
    return f"optimizer is {type(value).__name__}; give a torch.optim.Optimizer or a list of them{holds}"


def _distributed(module: torch.nn.Module, known: Collection[str]) -> str | None:
    """The class, among those of a module's parts and of these, that spreads it over processes or devices."""
    parts: Iterable[object] = (*module.modules(), *module.parameters())
    kinds = {base.__name__ for part in parts for base in type(part).__mro__}.intersection(known)
    return min(kinds, default=None)


# Of an optimizer's state


def stray_parameter(
    holder: str, group: int, position: int, parameter: torch.Tensor, known: Iterable[torch.Tensor] = ()
) -> InputError:
    """No checkpoint of the models would hold it; `known`: the models' parameters."""
    if not is_shared(parameter) and any(is_shared(one) and one.shape == parameter.shape for one in known):
        return InputError(
            f"{holder} updates parameter {position} of group {group}, shape {tuple(parameter.shape)}, which its model "
            "had before it was divided (fully_shard, parallelize_module); divide the model, then make the optimizer "
            "and attach"
        )
    return InputError(
        f"{holder} updates parameter {position} of group {group}, shape {tuple(parameter.shape)}, which belongs to no "
        "model; give its module too, or make it an nn.Parameter, and give nn.ParameterList([...]) of it in model=[...]"
    )


def no_entries(stem: StateName, state: object) -> InputError:
    """There is no entry whose name would be a tensor's."""
    kind = "a bare tensor" if isinstance(state, torch.Tensor) else f"a {type(state).__name__}"
    return InputError(f"{stem}: its state is {kind}; keep it in a dict, by name")


def nameless_entry(holder: str, parameter: StateName, entry: object) -> InputError:
    return InputError(f"{holder}.state of {parameter}: the entry {shown(entry, 80)} has no text as its name")


def stray_state(holder: str, kind: str, key: object) -> InputError:
    """`kind`: the optimizer's class."""
    is_tensor = isinstance(key, torch.Tensor)
    what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else f"the key {shown(key, 80)}"
    why, advice = ("", "remove it from the state") if is_tensor else (", and no text", "make it a text")
    return InputError(f"{holder}.state: {what} is no parameter of its groups{why} ({kind}); {advice}")


def divided_own(where: str, key: str) -> InputError:
    """Ranks divide the state by parameter, and this is of none."""
    return InputError(
        f"{where}: {key!r:.80} is kept under a text, for no parameter, and nothing says whether ranks have it alike "
        "where ZeroRedundancyOptimizer divides the state; use the optimizer in it by itself"
    )


def check_own(name: StateName, held: torch.Tensor) -> None:
    """Raises InputError for what an optimizer keeps under a text, if ranks share it."""
    if is_shared(held):
        raise InputError(
            f"{name}: ranks share it (DTensor), which is not supported in what an optimizer keeps under a text; keep "
            "it in the state of a parameter"
        )


# Of tensors


def check_tensor(name: StateName, tensor: torch.Tensor) -> None:
    """Raises InputError for one that has no bytes to copy."""
    check_stored(name, tensor)
    if tensor.is_conj() or tensor.is_neg():
        raise InputError(f"{name}: is a lazy conjugate or negative; store its resolve_conj().resolve_neg()")


def check_stored(name: StateName, tensor: torch.Tensor) -> None:
    """The same of one that is handed over element by element."""
    if (text := str(name).encode(errors="backslashreplace").decode()) != name:  # files have their names in UTF-8
        raise InputError(f"{text}: its name is no text (a lone surrogate); rename it")
    if is_lazy(tensor):
        raise InputError(f"{name}: has no shape yet (a lazy module); run the model once first")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        strided = "nested" if tensor.is_nested else "quantized"
        layout = strided if tensor.layout == torch.strided else tensor.layout
        raise InputError(f"{name}: layout {layout} is not supported; keep it as a dense tensor")
    if tensor.device.type == "meta":
        raise InputError(f"{name}: has no data yet (meta device); materialize it first")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InputError(f"{name}: device {tensor.device} is not supported; use cuda or cpu")
    if is_shared(tensor):
        raise InputError(
            f"{name}: ranks share it (DTensor), which is not supported in what is asked for its state; list a module "
            "that has it, or keep this rank's part of it there (to_local())"
        )


def check_shared_alike(name: StateName, entry: torch.Tensor, parameter: torch.Tensor) -> None:
    """Raises InputError for an optimizer's entry that ranks do not share as they share its parameter."""
    if not is_shared(parameter) or (not is_shared(entry) and entry.dim() == 0):
        return
    if not are_shared_alike(entry, parameter):
        raise InputError(
            f"{name}: is not divided among ranks as its parameter is, which is not supported yet; use another optimizer"
        )


def check_block(name: StateName, tensor: torch.Tensor) -> None:
    """Raises InputError for one that ranks share, where this rank's part has no place that a checkpoint could say."""
    if is_shared(tensor) and not is_block(tensor):
        placements = ", ".join(map(repr, tensor.placements))
        raise InputError(
            f"{name}: this rank's part of it, of shape {tuple(local(tensor).shape)}, is by its placements "
            f"({placements}) not one block of the whole, so that no other number of ranks could read it; divide it by "
            "Shard, or as fully_shard and parallelize_module do"
        )


def check_dense(name: StateName, tensor: torch.Tensor) -> None:
    """Raises InputError for one whose elements do not lie densely, each once. Optimizers' are copied by element."""
    if memory_order(tensor) is None:
        raise InputError(
            f"{name}: shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())} overlaps or has holes; "
            "make it contiguous"
        )


def check_dtype(name: StateName, dtype: str) -> None:
    """Raises InputError for one that no file of a checkpoint can hold."""
    if dtype not in CODES:
        raise InputError(f"{name}: dtype {dtype} cannot be stored; convert it first")


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The one CUDA device that has state, or the CPU. Raises InputError where there are several."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise InputError(f"model: its state lies on {names}; several devices in one process are not supported yet")
    return devices.pop() if devices else torch.device("cpu")
