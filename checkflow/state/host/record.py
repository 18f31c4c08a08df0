"""The wire form of the host's state: one JSON document that binds every part of a checkpoint to one iteration."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from checkflow.about import About
from checkflow.counts import Count, Positive
from checkflow.errors import FormatError
from checkflow.state.host.decode import load
from checkflow.state.host.earlier import has_earlier_names, record_of_now
from checkflow.state.host.json_values import Json, dump
from checkflow.state.host.rng import RngRecord

FORMAT: Final = "checkflow-record"
VERSION: Final = 1

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelRecord(BaseModel):
    """A model's tensors are in `file`; `extra` holds what get_extra_state gave, by the module's path. `tied` names the
    tensor that another one is, where the file has each for itself: they were tied while training ran."""

    model_config = _STRICT

    name: str  # "model", "model.1"
    file: str
    extra: dict[str, Json]
    tied: dict[str, str] = {}


class GroupRecord(BaseModel):
    """A param_group. `stored`: the keys whose tensors are in the file, as "param_groups.<number>.<key>"."""

    model_config = _STRICT

    parameters: tuple[str, ...]  # "model/features.0.weight"
    stored: tuple[str, ...]
    values: dict[str, Json]


class CohortRecord(BaseModel):
    """Parameters whose optimizer state has the same entries.

    Those in `stored` are in the file as "<parameter>.<entry>"; `host` has one tensor for each of the others, stacked
    over the parameters; `values` one value for each parameter. `apart`: entries that lie on the CPU while their
    parameter does not.
    """

    model_config = _STRICT

    parameters: tuple[str, ...]
    slots: tuple[str, ...]  # all entries, in the order of the optimizer's dict
    stored: tuple[str, ...]
    apart: tuple[str, ...]
    host: dict[str, Json]
    values: dict[str, tuple[Json, ...]]


class PartitionRecord(BaseModel):
    """Of an optimizer whose state these ranks divide by parameter: those whose state this rank keeps."""

    model_config = _STRICT

    ranks: tuple[Count, ...]
    parameters: tuple[str, ...]


class OwnRecord(BaseModel):
    """What an optimizer keeps under a text and not of a parameter, by that text.

    Tensors in the file are {"$stored": path}, as ".state.<text>" and what it is within that; a parameter that is a key
    is {"$parameter": name}. `apart`: paths of tensors that lie on the CPU while the parameters do not.
    """

    model_config = _STRICT

    values: dict[str, Json]
    apart: tuple[str, ...] = ()


class OptimizerRecord(BaseModel):
    """An optimizer. Parameters in no cohort have no state yet, or with a `partition` another rank's record has it.

    Of tensors in the file: `tied` names the one that another is, or the parameter; `orders` has the dimensions as they
    lie in memory, outermost first, where that is neither the parameter's order nor the logical one; `laid` has them
    of parameters, where that is not the logical order.
    """

    model_config = _STRICT

    name: str
    type: str
    module: str = ""  # where its class is, not known of older ones
    file: str
    groups: tuple[GroupRecord, ...]
    cohorts: tuple[CohortRecord, ...]
    tied: dict[str, str] = {}
    orders: dict[str, tuple[Count, ...]] = {}
    laid: dict[str, tuple[Count, ...]] = {}
    partition: PartitionRecord | None = None
    own: OwnRecord | None = None  # where it keeps something so; older versions refused it
    made: tuple[str, ...] = ()  # parameters as its state has them, where that is not the groups' order; likewise


class PartRecord(BaseModel):
    """Parameters that are saved, with their optimizers' state, as they were `back` iterations before the others.

    `optimizers` are as they were then; of their parameters only these count.
    """

    model_config = _STRICT

    back: Positive
    parameters: tuple[str, ...]
    optimizers: tuple[OptimizerRecord, ...]


class UpdateRecord(BaseModel):
    """An update, `back` iterations before the checkpoint's: its groups as they were, and what had gradients.

    A parameter's gradient is in the file "gradient.<back>.safetensors" under the parameter's name. Those in
    `factor_rows` are there as their factors: a vector that begins with that many rows of the first, and then as many of
    the second. All this has the same bits where as many `threads` do it, on the CPU; 0: older records did not say.
    """

    model_config = _STRICT

    back: Count
    optimizer: str
    groups: tuple[GroupRecord, ...]
    gradients: tuple[str, ...]
    factor_rows: dict[str, Count] = {}
    threads: Count = 0


class ReplayRecord(BaseModel):
    """The updates, in order, that bring each part to the checkpoint's iteration: those since it was saved."""

    model_config = _STRICT

    parts: tuple[PartRecord, ...]
    updates: tuple[UpdateRecord, ...]


class ObjectRecord(BaseModel):
    """The state_dict of something the user attached.

    Its tensors may be in `file`, as {"$stored": path}. `on_device`, `leaves`: paths of tensors that lay on the device,
    and of those that required a gradient.
    """

    model_config = _STRICT

    name: str  # "scheduler", "scaler", "loader"
    type: str
    state: Json
    file: str = ""
    on_device: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


class ApproximateRecord(BaseModel):
    """State that the host has made by so many updates since it was read of the training, to the bit.

    The first of them was `each` off, in units of the largest number in the same tensor.
    """

    model_config = _STRICT

    updates: Positive
    each: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MemberRecord(BaseModel):
    """Which process's part of a checkpoint this is. Parts belong together that are of one iteration and one attempt.

    `shares_buffers`: of each DistributedDataParallel, whether its next forward pass begins with the first rank's
    buffers. After an evaluation it does not, where a new one always does.
    """

    model_config = _STRICT

    rank: Count
    size: Positive
    attempt: Positive
    shares_buffers: tuple[bool, ...] = ()


class ShardRecord(BaseModel):
    """Where a rank's part of a tensor lies in the whole: by dimension, its first element there, and how many it has.

    `lowest`: of the ranks whose parts fill that whole, for another set of them may have another one of this name.
    """

    model_config = _STRICT

    shape: tuple[Count, ...]  # of the whole
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    lowest: Count | None = None  # None: older records did not say


class ChunkRecord(BaseModel):
    """A part of a tensor: whose file has it, under which name there, and where it lies in the whole."""

    model_config = _STRICT

    rank: Count
    tensor: str
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]


class TensorRecord(BaseModel):
    """A tensor of a state_dict, whole: torch's name of its dtype, its shape, and its parts."""

    model_config = _STRICT

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[ChunkRecord, ...]


class IndexRecord(BaseModel):
    """What all ranks' parts of a state_dict are together, by flattened key.

    `values`: whose record has what is no tensor; `planner`: what the planner keeps, where each key lies in the nested
    dict.
    """

    model_config = _STRICT

    tensors: dict[str, TensorRecord]
    values: dict[str, Count]
    planner: Json


class StateDictRecord(BaseModel):
    """What torch.distributed.checkpoint saved here: its tensors are in "state.safetensors", in no model's file.

    `index` is in one rank's record, which is written last.
    """

    model_config = _STRICT

    values: dict[str, Json]
    index: IndexRecord | None = None


class Record(BaseModel):
    """A checkpoint's host half. `iteration` iterations were completed."""

    model_config = _STRICT

    format: Literal["checkflow-record"]
    version: Literal[1]
    iteration: Count
    fingerprints: dict[str, str]
    versions: dict[str, str]
    models: tuple[ModelRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    objects: tuple[ObjectRecord, ...]
    rng: RngRecord
    metadata: Json
    about: About = About()
    replay: ReplayRecord | None = None  # of state that is saved as it was some iterations before
    lanes: tuple[Count, ...] = ()  # of files in lanes: how many iterations before, by lane
    member: MemberRecord | None = None  # of a training in several processes
    shards: dict[str, ShardRecord] = {}  # of tensors that ranks share, by state name
    elsewhere: dict[str, Count] = {}  # of what all ranks have alike: who saved it, by state name
    approximate: ApproximateRecord | None = None
    proof: str = ""  # of a delta: xxh3-128 of the state that its updates make, as training has it
    state_dict: StateDictRecord | None = None  # in the place of models, optimizers and objects
    losses: tuple[float, ...] = ()  # the last ones that step() was given, oldest first
    computed_by: dict[str, str] = {}  # what decides the last bits of results, by name; older records did not say
    frozen: tuple[str, ...] | None = None  # parameters that required no gradient; None: older records did not say
    gradients: tuple[str, ...] | None = None  # parameters that had a dense one; None: older records did not say
    modes: dict[str, bool] | None = None  # training mode, of models and of modules that differ from theirs; likewise


_RECORD = TypeAdapter(Record)


def parse_record(data: bytes, source: str = "commit.json") -> Record:
    """The record in a checkpoint's bytes, its state under the names of now.

    Raises FormatError that names the first wrong field.
    """
    document = load(data, source)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{source}: is not of format {FORMAT}; take another checkpoint")
    if document.get("version") != VERSION:
        raise FormatError(f"{source}: version {document.get('version')!r:.20} is not supported, only {VERSION}")
    if has_earlier_names(data):
        data = dump(record_of_now(document)).encode()
    try:
        return _RECORD.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise FormatError(f"{source}: field {where:.200}: {first['msg']}; take another checkpoint") from None
