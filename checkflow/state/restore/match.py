"""Matches a checkpoint with the live training by names, shapes and dtypes; the first difference is refused.

Everything is checked before anything is changed. What only an object itself can check (its load_state_dict) comes
first, loaders before the rest; the random generators come last, because making a loader's iterator may draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from checkflow.about import About
from checkflow.errors import CorruptStoreError, FormatError, InputError
from checkflow.extra import key_of
from checkflow.lanes import lane_of
from checkflow.state.divided import modules_alike
from checkflow.state.holders import extra_state_of, modules_of, optimizers_of, parts_of, unwrapped
from checkflow.state.host.decode import decode
from checkflow.state.host.gradients import set_to_zeros
from checkflow.state.host.objects import HostObjects
from checkflow.state.host.record import ApproximateRecord, ModelRecord, Record, parse_record
from checkflow.state.host.rng import RngStates, match_rng
from checkflow.state.live import Live, live_state, parameter_names
from checkflow.state.names import StateName, nearest, subject_of
from checkflow.state.restore.files import FileTensor, TensorFile, file_of_state, parse_file
from checkflow.state.restore.lanes import gathered
from checkflow.state.restore.objects import ObjectPlan, match_object
from checkflow.state.restore.optimizers import OptimizerPlan, match_optimizer
from checkflow.state.restore.replay import Replay, gradient_files, match_replay
from checkflow.state.shards import tie_of
from checkflow.torch_internals import is_persistent, own_buffers
from checkflow.training import Training

_ADVICE = "restore into the model that was saved"
_AFTER_FORWARD = f"{_ADVICE}; where its first forward pass makes that shape, run one before attach"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restored checkpoint said: iterations completed, fingerprints, and the user's own JSON.

    `missing`: what is listed as extra and was not when the checkpoint was taken; it stays as it is.
    `sets_otherwise`: objects with a set that iterates otherwise than it did.
    """

    iteration: int
    fingerprints: Mapping[str, str]
    metadata: Mapping[str, object]
    missing: tuple[str, ...] = ()
    about: About = field(default_factory=About)
    versions: Mapping[str, str] = field(default_factory=dict)  # and what it was computed by
    losses: tuple[float, ...] = ()
    approximate: ApproximateRecord | None = None  # what the host's updates made, where that is not the training's
    frozen: tuple[str, ...] | None = None  # parameters that required no gradient; None where that is not known
    replay_seconds: float | None = None  # what making updates again took; None where there were none to make
    sets_otherwise: tuple[str, ...] = ()


def restore(
    files: Mapping[str, memoryview],
    record: bytes,
    training: Training,
    objects: HostObjects,
    begin: Callable[[], None] = lambda: None,
    iteration: int | None = None,
) -> Restored:
    """Set models, optimizers, objects and generators to what the verified bytes of a checkpoint say.

    Args:
        files: each safetensors file's bytes by its name, given away: on the CPU they become the optimizers' state.
        record: the commit record's.
        training: the live models and optimizers; parameters and buffers are written in place, optimizer state too where
            it exists, and is created where it does not.
        objects: what was attached beside them.
        begin: called when everything is checked, before anything is changed.
        iteration: what the manifest says.

    Raises InputError that names the first difference, FormatError for bytes that no checkpoint of this version has,
    CorruptStoreError where the record is of another iteration.
    """
    tensors, parsed = read(files, record, iteration)
    return restore_parsed(tensors, parsed, training, objects, begin)


def read(files: Mapping[str, memoryview], record: bytes, iteration: int | None) -> tuple[dict[str, TensorFile], Record]:
    """A checkpoint's tensors and its record; `iteration`: what the manifest says. Raises FormatError, and
    CorruptStoreError where the record is of another iteration."""
    parsed = parse_record(record)
    if iteration is not None and parsed.iteration != iteration:
        raise CorruptStoreError(
            f"commit.json: is of iteration {parsed.iteration}, its checkpoint of {iteration}; take another checkpoint"
        )
    return files_of(parsed, files), parsed


def restore_parsed(
    tensors: Mapping[str, TensorFile],
    parsed: Record,
    training: Training,
    objects: HostObjects,
    begin: Callable[[], None] = lambda: None,
) -> Restored:
    """As `restore`, of what was read."""
    matched = _match(parsed, tensors, training, objects)
    begin()
    with torch.inference_mode(mode=False):  # what is made in it could not be trained
        replay_seconds = matched.apply()
        if parsed.gradients is not None:
            set_to_zeros(training, frozenset(parsed.gradients))
    return Restored(
        parsed.iteration, parsed.fingerprints, matched.metadata, matched.missing, parsed.about,
        parsed.versions | parsed.computed_by, parsed.losses, parsed.approximate, parsed.frozen, replay_seconds,
        tuple(found.name for found in matched.objects if found.sets_otherwise),
    )  # fmt: skip


def check_restorable(files: Mapping[str, TensorFile], record: bytes, training: Training, objects: HostObjects) -> None:
    """Match a checkpoint with the training it is of, by all but its tensors' bytes. Raises what a restore would."""
    _match(parse_record(record), files, training, objects)


@dataclass(frozen=True, slots=True)
class _Matched:
    """What goes where. Nothing was changed yet."""

    objects: list[ObjectPlan]
    copies: list[tuple[Live, FileTensor]]
    extra: list[tuple[torch.nn.Module, object]]
    plans: list[OptimizerPlan]
    generators: RngStates
    metadata: dict[str, object]
    missing: tuple[str, ...]
    replay: Replay | None
    shares_buffers: list[tuple[DistributedDataParallel, bool]]

    def apply(self) -> float | None:
        """Returns what making updates again took, in seconds; None where there were none to make."""
        replay_seconds = None
        for found in self.objects:
            if found.is_loader:
                found.load()
        with torch.no_grad():
            for live, source in self.copies:
                live.tensor.copy_(source.view())
                if live.buffer and live.module is not None:  # for one that was None
                    own_buffers(live.module)[str(live.key)] = live.held
        for module, state in self.extra:
            module.set_extra_state(state)
        for ddp, shares in self.shares_buffers:
            ddp.require_forward_param_sync = shares
        for plan in self.plans:
            (plan if self.replay is None else self.replay.begun(plan)).apply()
        if self.replay is not None:
            replay_seconds = self.replay.timed()
        for plan in self.plans:
            plan.arrange()
        for found in self.objects:
            if not found.is_loader:
                found.load()
        self.generators.restore()
        return replay_seconds


def _match(parsed: Record, tensors: Mapping[str, TensorFile], training: Training, objects: HostObjects) -> _Matched:
    check_is_of_training(parsed)
    tensors = {**dict.fromkeys(_file_names(parsed), TensorFile({}, {})), **tensors}  # without state there is no file
    names = parameter_names(training)
    models = modules_of(training)
    held = [*models, *training.listed.tensors]
    optimizers = optimizers_of(training)
    saved = {model.name for model in parsed.models} | {found.name for found in parsed.objects}
    missing = tuple(name for name in training.listed.holders if name not in saved)
    _same_names("model", held, [model.name for model in parsed.models], missing)
    _same_names("optimizer", list(optimizers), [optimizer.name for optimizer in parsed.optimizers])
    _same_names("object", list(objects.objects), [found.name for found in parsed.objects], missing)
    lives = live_state(training)
    lives += [
        live
        for model in parsed.models
        if model.name in models
        for live in _made_since(model.name, models[model.name], tensors[model.file], lives)
    ]
    at = parsed.iteration
    copies = [copy for model in parsed.models for copy in _match_model(model, lives, tensors[model.file], at)]
    extra = [
        found
        for model in parsed.models
        if model.name in models
        for found in _match_extra(model, models[model.name], at)
    ]
    plans = [match_optimizer(optimizers[found.name], names, found, tensors[found.file]) for found in parsed.optimizers]
    device = next((live.tensor.device for live in lives if live.tensor.device.type == "cuda"), torch.device("cpu"))
    empty = TensorFile({}, {})
    matched = [
        match_object(objects.objects[found.name], found, tensors.get(found.file, empty), device)
        for found in parsed.objects
    ]
    generators = match_rng(parsed.rng, objects.generators)
    metadata = decode(parsed.metadata, "metadata")
    if not isinstance(metadata, dict):
        raise FormatError("metadata: is no object; take another checkpoint")
    replay = None if parsed.replay is None else match_replay(parsed.replay, tensors, optimizers, names)
    shares = parsed.member.shares_buffers if parsed.member is not None else ()
    ours = modules_alike(training)
    buffers = list(zip(ours, shares, strict=True)) if len(ours) == len(shares) else []  # of another kind of training
    return _Matched(matched, copies, extra, plans, generators, metadata, missing, replay, buffers)


def check_is_of_training(record: Record) -> None:
    """Raises InputError for what torch.distributed.checkpoint saved."""
    if record.state_dict is not None:
        raise InputError(
            f"iteration {record.iteration} is a state_dict that StoreWriter saved; read it with "
            "torch.distributed.checkpoint's load and a StoreReader, or choose another iteration"
        )


def files_of(record: Record, files: Mapping[str, memoryview]) -> dict[str, TensorFile]:
    """The checkpoint's files by what its record says of them, those of its lanes gathered."""
    if record.lanes:
        return gathered(record.lanes, {name: file_in(record, name, data) for name, data in files.items()})
    return {name: file_in(record, name, files[name]) for name in _file_names(record) if name in files}


def file_in(record: Record, name: str, data: memoryview) -> TensorFile:
    """A file of the checkpoint: what an object or a state_dict gave has the names that it had there."""
    lane = lane_of(name)
    given = {found.file for found in record.objects}
    is_given = record.state_dict is not None or (name if lane is None else lane[1]) in given
    return parse_file(name, data) if is_given else file_of_state(name, data)


def _file_names(record: Record) -> list[str]:
    names = [model.file for model in record.models] + [optimizer.file for optimizer in record.optimizers]
    names += gradient_files(record.replay) if record.replay is not None else []
    return names + [found.file for found in record.objects if found.file]


def _same_names(kind: str, ours: list[str], saved: list[str], missing: tuple[str, ...] = ()) -> None:
    for name in saved:
        if name not in ours and key_of(name) is not None:
            raise InputError(f"{name}: is in the checkpoint; list it: attach(extra={{...}}) with what was saved")
        if name not in ours:
            raise InputError(f"{name}: is in the checkpoint, but no such {kind} is attached; attach what was saved")
    for name in ours:
        if saved.count(name) != 1 and name not in missing:
            raise InputError(f"{name}: is attached, but the checkpoint has no such {kind}; attach what was saved")


def _match_model(
    record: ModelRecord, lives: list[Live], file: TensorFile, iteration: int
) -> list[tuple[Live, FileTensor]]:
    found: list[tuple[Live, FileTensor]] = []
    ours: dict[tuple[object, ...], Live] = {}  # the first name of each tensor here
    saved: dict[str, Live] = {}  # and there
    mine = [live for live in lives if live.name.holder == record.name and live.optimizer is None]
    stored = [StateName.of(record.name, name) for name in (*file.tensors, *file.aliases)]
    _same_state([live.name for live in mine], stored, iteration)
    for live in mine:
        name = live.name.path
        source = file.tensors[file.aliases.get(name, name)]
        shape, dtype = tuple(live.tensor.shape), live.tensor.dtype
        if shape != source.shape:
            advice = _AFTER_FORWARD if live.buffer else _ADVICE
            raise InputError(f"{live.name}: has shape {shape}, {source.shape} in the checkpoint; {advice}")
        if dtype != source.dtype:
            raise InputError(f"{live.name}: has dtype {dtype}, {source.dtype} in the checkpoint; {_ADVICE}")
        tensor = record.tied.get(name, name)
        there = saved.setdefault(file.aliases.get(tensor, tensor), live)
        here = ours.setdefault(tie_of(live.held), live)
        if here is not there:
            if here is not live:
                raise InputError(f"{live.name}: is tied to {here.name} here, but not in the checkpoint; {_ADVICE}")
            raise InputError(f"{live.name}: is tied to {there.name} only in the checkpoint; tie it before restore()")
        if here is live:
            found.append((live, source))
    return found


def _same_state(ours: Sequence[str], saved: Sequence[str], iteration: int) -> None:
    """Raises InputError that names the first of either that the other has not: training may have changed what there is,
    and the model is to be as it was then."""
    here, there = _beyond(ours, saved), _beyond(saved, ours)
    if here and there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        what = f"{here[0]}: is in this model, but not in the checkpoint, and {there[0]}{more} the other way round"
        grown = f"where training changes it, change it into what it was at iteration {iteration}"
    elif here:
        what = f"{here[0]}: is in this model, but not in the checkpoint{nearest(here[0], saved)}"
        grown = f"where training takes from it, take what it had no more at iteration {iteration}"
    elif there:
        what = f"{there[0]}: is in the checkpoint, but not in this model{nearest(there[0], ours)}"
        grown = f"where training adds to it, add what it had at iteration {iteration}"
    else:
        return
    raise InputError(f"{what}; {_ADVICE}; {grown} and call restore() again")


def _beyond(names: Sequence[str], others: Sequence[str]) -> list[str]:
    known = frozenset(others)
    return [name for name in names if name not in known]


def _made_since(holder: str, model: torch.nn.Module, file: TensorFile, lives: Sequence[Live]) -> Iterator[Live]:
    """Buffers that are None here, as they were until training made them: each with the tensor that it gets."""
    theirs = [live for live in lives if live.name.holder == holder]
    made: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}  # a module may have two paths
    for path, module in parts_of(unwrapped(model), each_path=True):
        for key, buffer in own_buffers(module).items():
            name = f"{path}.{key}" if path else key
            source = file.tensors.get(file.aliases.get(name, name))
            if buffer is not None or source is None or not is_persistent(module, key):
                continue
            beside = [live for live in theirs if live.module is module] or theirs
            device = beside[0].tensor.device if beside else None
            if (module, key) not in made:
                with torch.inference_mode(mode=False):
                    made[module, key] = torch.empty(source.shape, dtype=source.dtype, device=device)
            yield Live(StateName.of(holder, name), made[module, key], own_buffers(module), key, module, buffer=True)


def _match_extra(record: ModelRecord, model: torch.nn.Module, iteration: int) -> list[tuple[torch.nn.Module, object]]:
    modules = extra_state_of(model)
    ours, saved = (
        [StateName.of(record.name, f"{path}._extra_state" if path else "_extra_state") for path in sorted(each)]
        for each in (modules, record.extra)
    )
    _same_state(ours, saved, iteration)
    return [(module, decode(record.extra[path], subject_of(record.name, path))) for path, module in modules.items()]
