"""A checkpoint in parts or lanes as one whole, without its training: the updates are made again on the host.

What that takes is in the checkpoint: parameters, their optimizers' classes and groups, gradients. An optimizer that is
none of torch's is not made here, since its code is the training's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch

from checkflow import strictjson
from checkflow.dtypes import ITEM_BYTES
from checkflow.errors import FormatError, InputError
from checkflow.safetensorsfile import header_of
from checkflow.state.host.capture import versions
from checkflow.state.host.record import OptimizerRecord, Record, parse_record
from checkflow.state.memory import as_bytes, laid
from checkflow.state.names import StateName, file_of, holder_of, is_of_kind, stems
from checkflow.state.restore.files import DTYPES, FileTensor, TensorFile
from checkflow.state.restore.match import files_of
from checkflow.state.restore.of_some import state_of_some
from checkflow.state.restore.optimizers import match_optimizer
from checkflow.state.restore.replay import ELSEWHERE, match_replay, same

_ALIGN_BYTES = 4096  # as in the store's files
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Whole:
    """A checkpoint as if it had left in one. `differs`: why its bits may not be the training's."""

    files: Mapping[str, memoryview]
    record: bytes
    updates: int = 0  # that were made again
    differs: str = ""


def whole(files: Mapping[str, memoryview], record: bytes) -> Whole:
    """The checkpoint as one whole, without the gradients, which nothing needs any more.

    Raises FormatError for what no checkpoint has, InputError where only its training can bring it together.
    """
    parsed = parse_record(record)
    if not is_in_parts(parsed):
        return Whole({name: data for name, data in files.items() if not is_of_gradients(name)}, record)
    found = brought_together(parsed, files_of(parsed, files))
    return Whole({name: written(file) for name, file in found.items()}, record_of_whole(record), *what_was_made(parsed))


def is_in_parts(record: Record) -> bool:
    """Whether its files are of several iterations, and some updates are to be made again."""
    return record.replay is not None or bool(record.lanes)


def brought_together(record: Record, files: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """The files of one in parts, those of its lanes gathered, as if it had left in one. Raises as `whole` does."""
    found = files if record.replay is None else _remade(record, files)
    return {name: file for name, file in found.items() if not is_of_gradients(name)}


def what_was_made(record: Record) -> tuple[int, str]:
    """How many updates are made again for one in parts, and why its bits may not be the training's; "" where they
    are."""
    return (0, "") if record.replay is None else (len(record.replay.updates), _other_bits(record))


def record_of_whole(record: bytes) -> bytes:
    """The record of a checkpoint in parts or lanes without what it says of them."""
    document = strictjson.loads(record)
    assert isinstance(document, dict)
    as_one = {key: value for key, value in document.items() if key not in ("replay", "lanes", "proof")}
    return json.dumps(as_one, separators=(",", ":"), ensure_ascii=False).encode()


def is_of_gradients(file: str) -> bool:
    """Whether its tensors are gradients, which are no state."""
    return is_of_kind(file, "gradient")


def _other_bits(record: Record) -> str:
    """Why the updates may have other bits here than they had in training; nothing where that is not known."""
    now = versions()
    if record.rng.cuda:
        return "it may have trained on a CUDA device"
    if record.versions.get("torch") != now["torch"]:
        return f"torch was {record.versions.get('torch')} there, and is {now['torch']} here"
    return ""


def _remade(record: Record, files: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """The files with the updates made again that the record tells of."""
    made = updated(record, files, _parameters(record, files))
    return {
        name: replace(
            file,
            tensors={
                path: _with_bytes(tensor, made.get(StateName.of(holder_of(name), path)))
                for path, tensor in file.tensors.items()
            },
        )
        for name, file in files.items()
    }


def updated(
    record: Record, files: Mapping[str, TensorFile], parameters: Mapping[StateName, torch.nn.Parameter]
) -> dict[StateName, torch.Tensor]:
    """Makes the updates again that a record tells of, in these parameters: all that its optimizers have, as saved.

    Returns what was made by name, the parameters among it. What optimizers keep of them may lie in the files' memory.
    Raises InputError where only its training can do it, FormatError for what no checkpoint has.
    """
    assert record.replay is not None
    names = {id(parameter): name for name, parameter in parameters.items()}
    optimizers = {found.name: _optimizer(found, parameters) for found in record.optimizers}
    here = {name for name in parameters if name not in record.elsewhere}
    plans = [
        match_optimizer(optimizers[found.name], names, found, files.get(found.file, TensorFile({}, {})))
        for found in (state_of_some(each, here) for each in record.optimizers)
    ]
    replay = match_replay(record.replay, files, optimizers, names)
    for plan in plans:
        replay.begun(plan).apply()
    replay.run()
    made: dict[StateName, torch.Tensor] = {names[id(parameter)]: parameter for parameter in replay.back}
    for found, plan in zip(record.optimizers, plans, strict=True):
        stem = stems(found.name, (StateName(name) for group in found.groups for name in group.parameters))
        for parameter in replay.back:
            for entry, value in plan.states.get(parameter, {}).items():
                now = plan.optimizer.state[parameter].get(entry)
                if isinstance(value, FileTensor) and isinstance(now, torch.Tensor):
                    made[stem[names[id(parameter)]].inside(entry)] = now
                elif isinstance(value, FileTensor) or not same(value, now):
                    where = names[id(parameter)]
                    raise FormatError(
                        f"{found.name}: {entry} of {where:.200} is not what its updates lead to; {ELSEWHERE}"
                    )
    return made


def _parameters(record: Record, files: Mapping[str, TensorFile]) -> dict[StateName, torch.nn.Parameter]:
    """Those of all optimizers, as they were saved; in the place of what another rank saved stand empty ones."""
    found: dict[StateName, torch.nn.Parameter] = {}
    laid = dict(chain.from_iterable(optimizer.laid.items() for optimizer in record.optimizers))
    groups = chain.from_iterable(optimizer.groups for optimizer in record.optimizers)
    for name in map(StateName, chain.from_iterable(group.parameters for group in groups)):
        file = files.get(file_of(name.holder), TensorFile({}, {}))
        saved = file.tensors.get(file.aliases.get(name.path, name.path))
        if saved is None and name in record.elsewhere:
            found[name] = torch.nn.Parameter(torch.empty((0, 0)))  # of two dimensions, which Muon asks for
            continue
        if saved is None:
            raise FormatError(f"commit.json: {name:.200} is in no file; {ELSEWHERE}")
        value = _laid(saved.view(), laid.get(name), name)
        found[name] = torch.nn.Parameter(value, requires_grad=saved.dtype.is_floating_point)
    return found


def _laid(value: torch.Tensor, order: tuple[int, ...] | None, name: str) -> torch.Tensor:
    """As it lay in memory: what is computed of it may depend on that in its last bits."""
    if order is None:
        return value
    if sorted(order) != list(range(value.dim())):
        raise FormatError(f"commit.json: {name:.200} has no order {order!s:.80}; {ELSEWHERE}")
    return laid(value, order)


def _optimizer(record: OptimizerRecord, parameters: Mapping[StateName, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of its class, with its groups; without state."""
    made = getattr(torch.optim, record.type, None) if f"{record.module}.".startswith("torch.optim.") else None
    if not isinstance(made, type) or not issubclass(made, torch.optim.Optimizer):
        raise InputError(f"its updates are those of {record.type}, which is not torch's own; {ELSEWHERE}")
    groups = [{"params": [parameters[StateName(name)] for name in group.parameters]} for group in record.groups]
    optimizer = made(groups)  # type: ignore[call-arg]
    for group, saved in zip(optimizer.param_groups, record.groups, strict=True):
        group.update({key: value for key, value in saved.values.items() if isinstance(value, (bool, type(None)))})
    return optimizer


def _with_bytes(tensor: FileTensor, now: torch.Tensor | None) -> FileTensor:
    if now is None:
        return tensor
    return replace(tensor, data=memoryview(as_bytes(now).numpy()), order=None)  # type: ignore[arg-type]


def written(file: TensorFile) -> memoryview:
    """The bytes of a file of these tensors, the largest elements first so that each is aligned."""
    ordered = sorted(file.tensors.items(), key=lambda one: (-ITEM_BYTES[_CODES[one[1].dtype]], one[0]))
    header = header_of(
        ((name, _CODES[tensor.dtype], tensor.shape) for name, tensor in ordered), file.aliases.items(), _ALIGN_BYTES
    )
    return memoryview(bytearray().join([header, *(tensor.data for _, tensor in ordered)]))
