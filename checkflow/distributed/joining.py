"""What ranks have under names that the first one does not have, as the stages of a pipeline: taken over from the lowest
rank that has it.

Whether a rank has more is seen by the parameters that its record names; then its buffers are looked at, too. What each
rank has by itself (generators, objects) stays the first one's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from checkflow.errors import InputError
from checkflow.state.host.record import GroupRecord, ModelRecord, OptimizerRecord, Record
from checkflow.state.names import StateName, holder_of
from checkflow.state.restore.files import TensorFile
from checkflow.state.restore.of_some import cohort_of_some


def has_more(record: Record, known: Collection[StateName]) -> bool:
    """Whether a rank has parameters that are not among these names."""
    return any(name not in known for name in parameters_in(record))


def parameters_in(record: Record) -> list[StateName]:
    """Those that it names, each once."""
    shared = (StateName(name) for name in (*record.shards, *record.elsewhere))
    groups = (group for optimizer in record.optimizers for group in optimizer.groups)
    updated = (StateName(name) for group in groups for name in group.parameters)
    frozen = map(StateName, record.frozen or ())
    return list(dict.fromkeys((*updated, *frozen, *(name for name in shared if not name.is_optimizers))))


def files_of_all(record: Record) -> set[str]:
    """Those of models and optimizers."""
    return {model.file for model in record.models} | {optimizer.file for optimizer in record.optimizers}


def names_in(files: Mapping[str, TensorFile]) -> set[StateName]:
    """Of the tensors in files, tied ones among them."""
    return {
        StateName.of(holder_of(name), path) for name, file in files.items() for path in (*file.tensors, *file.aliases)
    }


def joined_files(
    files: Mapping[str, TensorFile], theirs: Mapping[str, TensorFile], only: Iterable[str]
) -> dict[str, TensorFile]:
    """The files with what others have under more names; `only` these."""
    found = dict(files)
    for name in only:
        if (file := theirs.get(name)) is None:
            continue
        held = found.get(name, TensorFile({}, {}))
        known = {*held.tensors, *held.aliases}
        tensors = {path: tensor for path, tensor in file.tensors.items() if path not in known}
        aliases = {path: held.aliases.get(to, to) for path, to in file.aliases.items() if path not in known}
        found[name] = TensorFile({**held.tensors, **tensors}, {**held.aliases, **aliases})
    return found


def joined_record(record: Record, theirs: Record, known: Collection[StateName], rank: int) -> Record:
    """The record with what another rank's says of names that are not known.

    Raises InputError that names what of it one record cannot say, FormatError for what no record has.
    """
    models = {model.name: model for model in record.models}
    for model in theirs.models:
        held = models.get(model.name)
        models[model.name] = model if held is None else _joined_model(held, model, known)
    optimizers = {optimizer.name: optimizer for optimizer in record.optimizers}
    for optimizer in theirs.optimizers:
        ours = optimizers.get(optimizer.name)
        optimizers[optimizer.name] = optimizer if ours is None else _joined_optimizer(ours, optimizer, known, rank)
    frozen = None if record.frozen is None else tuple(dict.fromkeys((*record.frozen, *(theirs.frozen or ()))))
    gradients = (
        None if record.gradients is None else tuple(dict.fromkeys((*record.gradients, *(theirs.gradients or ()))))
    )
    modes = None if record.modes is None or theirs.modes is None else {**theirs.modes, **record.modes}
    joined = {"models": tuple(models.values()), "optimizers": tuple(optimizers.values())}
    return record.model_copy(update={**joined, "frozen": frozen, "gradients": gradients, "modes": modes})


def _joined_model(held: ModelRecord, theirs: ModelRecord, known: Collection[StateName]) -> ModelRecord:
    tied = {path: to for path, to in theirs.tied.items() if StateName.of(theirs.name, path) not in known}
    return held.model_copy(update={"extra": {**theirs.extra, **held.extra}, "tied": {**held.tied, **tied}})


def _joined_optimizer(
    held: OptimizerRecord, theirs: OptimizerRecord, known: Collection[StateName], rank: int
) -> OptimizerRecord:
    ours = {name for group in held.groups for name in group.parameters}
    groups, more = list(held.groups), set[str]()
    for number, group in enumerate(theirs.groups):
        parameters = tuple(name for name in group.parameters if name not in ours)
        if not parameters:
            continue
        more.update(parameters)
        why = ""
        if (theirs.type, theirs.module) != (held.type, held.module):
            why = f"updated by a {theirs.type}, where rank 0 has a {held.type}"
        elif group.stored:
            why = f"in a group whose {group.stored[0]!r:.80} is a tensor"
        if why:
            raise InputError(
                f"{parameters[0]:.200}: only rank {rank} has it, {why}, which one {held.name} cannot say of all ranks; "
                "restore the checkpoint in its training, and save it from there"
            )
        same = number < len(groups) and (groups[number].values, groups[number].stored) == (group.values, ())
        if same:
            groups[number] = groups[number].model_copy(update={"parameters": groups[number].parameters + parameters})
        else:
            groups.append(GroupRecord(parameters=parameters, stored=(), values=group.values))
    cohorts = (cohort_of_some(cohort, more, theirs.name) for cohort in theirs.cohorts)

    def fresh(path: str) -> bool:
        return StateName.of(theirs.name, path) not in known

    return held.model_copy(
        update={
            "groups": tuple(groups),
            "cohorts": (*held.cohorts, *(cohort for cohort in cohorts if cohort.parameters)),
            "tied": {**held.tied, **{path: to for path, to in theirs.tied.items() if fresh(path)}},
            "orders": {**held.orders, **{path: order for path, order in theirs.orders.items() if fresh(path)}},
            "laid": {**held.laid, **{name: order for name, order in theirs.laid.items() if name in more}},
        }
    )
