"""Graph <-> JSON. The format is described in graphs/FORMAT.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from checkflow.counts import Amount, Count, Positive, Total
from checkflow.errors import FormatError
from checkflow.graph import Anchor, AnchorKind, Collective, CollectiveKind, Graph, Op, Role, Tensor, View
from checkflow.jsonfile import digest_of, parse_json, render, validate, write_text
from checkflow.unlisted import Unlisted

FORMAT: Literal["checkflow-graph"] = "checkflow-graph"
VERSION: Literal[1] = 1
_MOST_BYTES = 2**62  # of all tensors at once: planners count in 64 bits


class _GraphRow(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GraphViewRow(_GraphRow):
    """One name of a state storage."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class TensorRow(_GraphRow):
    """One storage; its index is its place among the rows, from 0."""

    name: str
    role: Role = Role.ACTIVATION
    bytes: Count
    born: Count = 0
    freed: Count
    views: tuple[GraphViewRow, ...] = ()
    of: str = ""


class CollectiveRow(_GraphRow):
    """What an operator moves between ranks."""

    kind: CollectiveKind
    bytes: Count
    ranks: Positive
    stride: Positive = 1


class OpRow(_GraphRow):
    """One operator; its step is its place among the rows, from 1."""

    op: str
    reads: tuple[Count, ...] = ()
    writes: tuple[Count, ...] = ()
    flops: Amount = 0
    traffic_bytes: Amount = 0
    dtype: str = "float32"
    time_ns: Amount = 0
    collective: CollectiveRow | None = None


class GraphAnchorRow(_GraphRow):
    """One place where a hook runs."""

    kind: AnchorKind
    subject: str = ""
    occurrence: Positive = 1
    position: Count


class GraphUnlistedRow(_GraphRow):
    """What the iteration hands on to the next though it is no state."""

    name: str = ""
    bytes: Count
    where: str = ""
    scaler: bool = False


class GraphDocument(_GraphRow):
    """A graph file."""

    format: Literal["checkflow-graph"]
    version: Literal[1]
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    model: str
    arguments: tuple[tuple[str, str], ...]
    device: str
    traced_on: str
    host_state_bytes: Total
    tensors: tuple[TensorRow, ...]
    ops: Annotated[tuple[OpRow, ...], Field(min_length=1)]
    anchors: Annotated[tuple[GraphAnchorRow, ...], Field(min_length=1)]
    unlisted: tuple[GraphUnlistedRow, ...] = ()
    world_size: Positive = 1
    divided: bool = False


_READER = TypeAdapter(GraphDocument)


def graph_document(graph: Graph) -> dict[str, object]:
    """The graph as the JSON object that is written, its digest included. Rows leave out default values."""
    content = _content(graph)
    head = {"format": FORMAT, "version": VERSION, "digest": digest_of(content)}
    return head | content


def graph_fingerprint(graph: Graph) -> str:
    """Digest of the whole graph, timings included: the `digest` of its file."""
    return digest_of(_content(graph))


def state_fingerprint(graph: Graph) -> str:
    """Digest of the state's names, dtypes and shapes: the same for another batch size, device or schedule."""
    return digest_of(
        sorted(
            sorted([view.name, view.dtype, list(view.shape)] for view in tensor.views)
            for tensor in graph.tensors
            if tensor.role.is_state
        )
    )


def write_graph(path: Path, graph: Graph) -> None:
    """Write the graph, whole or not at all. Raises InputError where it cannot be written."""
    write_text(path, render(graph_document(graph)))


def read_graph(path: Path) -> Graph:
    """The graph in a file. Raises FormatError, one line, where it is not one or contradicts itself."""
    document = validate(_READER, parse_json(path, FORMAT, VERSION), str(path))
    graph = _graph(document)
    for complaint in _complaints(graph):
        raise FormatError(f"{path}: {complaint}; trace the model again")
    if document.digest != graph_fingerprint(graph):
        raise FormatError(
            f"{path}: field digest: is not the digest of this content, the file was changed or damaged; trace the "
            "model again"
        )
    return graph


def json_schema() -> dict[str, object]:
    """The JSON Schema of a graph file, as graphs/graph.schema.json holds it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | _READER.json_schema()


def _content(graph: Graph) -> dict[str, object]:
    return {
        "model": graph.model,
        "arguments": [list(pair) for pair in graph.arguments],
        "device": graph.device,
        "traced_on": graph.traced_on,
        "host_state_bytes": graph.host_state_bytes,
        "tensors": [_row(_tensor_row(tensor)) for tensor in graph.tensors],
        "ops": [_row(_op_row(op)) for op in graph.ops],
        "anchors": [_row(_anchor_row(anchor)) for anchor in graph.anchors],
        **({"unlisted": [_row(_unlisted_row(found)) for found in graph.unlisted]} if graph.unlisted else {}),
        **({"world_size": graph.world_size} if graph.world_size > 1 else {}),
        **({"divided": True} if graph.divided else {}),
    }


def _row(row: _GraphRow) -> dict[str, object]:
    return row.model_dump(mode="json", exclude_defaults=True)


def _tensor_row(tensor: Tensor) -> TensorRow:
    return TensorRow(
        name=tensor.name,
        role=tensor.role,
        bytes=tensor.size_bytes,
        born=tensor.born,
        freed=tensor.freed,
        views=tuple(GraphViewRow(name=view.name, dtype=view.dtype, shape=view.shape) for view in tensor.views),
        of=tensor.of,
    )


def _op_row(op: Op) -> OpRow:
    return OpRow(
        op=op.name,
        reads=op.reads,
        writes=op.writes,
        flops=op.flops,
        traffic_bytes=op.traffic_bytes,
        dtype=op.dtype,
        time_ns=op.time_ns,
        collective=None if op.collective is None else _collective_row(op.collective),
    )


def _collective_row(found: Collective) -> CollectiveRow:
    return CollectiveRow(kind=found.kind, bytes=found.size_bytes, ranks=found.ranks, stride=found.stride)


def _anchor_row(anchor: Anchor) -> GraphAnchorRow:
    return GraphAnchorRow(
        kind=anchor.kind, subject=anchor.subject, occurrence=anchor.occurrence, position=anchor.position
    )


def _unlisted_row(found: Unlisted) -> GraphUnlistedRow:
    return GraphUnlistedRow(name=found.name, bytes=found.size_bytes, where=found.where, scaler=found.scaler)


def _graph(document: GraphDocument) -> Graph:
    return Graph(
        model=document.model,
        arguments=document.arguments,
        device=document.device,
        traced_on=document.traced_on,
        ops=tuple(
            Op(
                row.op,
                row.reads,
                row.writes,
                row.flops,
                row.traffic_bytes,
                row.dtype,
                row.time_ns,
                None if row.collective is None else _collective(row.collective),
            )
            for row in document.ops
        ),
        tensors=tuple(
            Tensor(
                row.name,
                row.role,
                row.bytes,
                row.born,
                row.freed,
                tuple(View(view.name, view.dtype, view.shape) for view in row.views),
                row.of,
            )
            for row in document.tensors
        ),
        anchors=tuple(Anchor(row.kind, row.subject, row.occurrence, row.position) for row in document.anchors),
        host_state_bytes=document.host_state_bytes,
        unlisted=tuple(Unlisted(row.name, row.bytes, row.where, row.scaler) for row in document.unlisted),
        world_size=document.world_size,
        divided=document.divided,
    )


def _collective(row: CollectiveRow) -> Collective:
    return Collective(row.kind, row.bytes, row.ranks, row.stride)


def _complaints(graph: Graph) -> Iterator[str]:
    """What contradicts itself in a graph whose fields have the right types, most telling first."""
    dangling = list(_dangling(graph))  # all else follows the indices of operators
    yield from dangling or chain(_wrong_tensors(graph), _wrong_ops(graph), _wrong_anchors(graph), _too_large(graph))


def _dangling(graph: Graph) -> Iterator[str]:
    for step, op in enumerate(graph.ops, start=1):
        for index in (*op.reads, *op.writes):
            if index >= len(graph.tensors):
                yield f"{_where(step, op)}: tensor {index} is not one of the {len(graph.tensors)} tensors"


def _wrong_tensors(graph: Graph) -> Iterator[str]:
    names: set[str] = set()
    for index, tensor in enumerate(graph.tensors):
        where = f"field tensors.{index} ({tensor.name!r})"
        if not tensor.born <= tensor.freed <= graph.steps:
            yield f"{where}: lives from {tensor.born} to {tensor.freed}, not within steps 0..{graph.steps} in order"
        if tensor.role.is_state and (tensor.born, tensor.freed) != (0, graph.steps):
            yield f"{where}: is state, which lives from 0 to {graph.steps}, not from {tensor.born} to {tensor.freed}"
        if tensor.role.is_state != bool(tensor.views):
            yield f"{where}: has {len(tensor.views)} views; state has at least one, nothing else has any"
        if tensor.of and tensor.role not in (Role.GRADIENT, Role.OPTIMIZER):
            yield f"{where}: is of {tensor.of!r}, which only a gradient or an optimizer's entry is"
        for view in tensor.views:
            if view.name in names:
                yield f"{where}: the name {view.name!r} stands for two storages"
            names.add(view.name)


def _too_large(graph: Graph) -> Iterator[str]:
    """Asked last: it follows from when tensors live."""
    if graph.training_peak_bytes > _MOST_BYTES:
        yield f"field tensors: have more than {_MOST_BYTES} bytes at once"


def _wrong_ops(graph: Graph) -> Iterator[str]:
    for step, op in enumerate(graph.ops, start=1):
        for index in op.reads:
            if step <= graph.tensors[index].born:
                yield f"{_where(step, op)}: {_out_of_order(graph, index)}"
        for index in (*op.reads, *op.writes):
            tensor = graph.tensors[index]
            if not tensor.born <= step <= tensor.freed:
                yield (
                    f"{_where(step, op)}: uses tensor {index} ({tensor.name!r}), which is there only from step "
                    f"{tensor.born} to {tensor.freed}"
                )


def _where(step: int, op: Op) -> str:
    return f"field ops.{step - 1} (step {step}, {op.name!r})"


def _out_of_order(graph: Graph, index: int) -> str:
    """Why a step cannot read a tensor that itself or a later step creates: a cycle, or only the order of the rows."""
    import networkx as nx  # for an error alone: it takes longer to import than all else that a trainer needs of this

    dag: nx.DiGraph[int] = nx.DiGraph()
    for user, op in enumerate(graph.ops, start=1):
        dag.add_edges_from((graph.tensors[read].born, user) for read in op.reads if graph.tensors[read].born > 0)
    try:
        cycle = [source for source, _ in nx.find_cycle(dag)]
    except nx.NetworkXNoCycle:
        tensor = graph.tensors[index]
        return f"is out of order: it reads tensor {index} ({tensor.name!r}), which step {tensor.born} creates"
    first = cycle.index(min(cycle))
    cycle = [*cycle[first:], *cycle[: first + 1]]
    return f"the graph has a cycle: steps {' -> '.join(str(found) for found in cycle)}"


def _wrong_anchors(graph: Graph) -> Iterator[str]:
    last = -1
    fired: dict[tuple[AnchorKind, str], int] = {}
    for number, anchor in enumerate(graph.anchors):
        where = f"field anchors.{number} ({anchor.kind} {anchor.subject!r})"
        if not last < anchor.position <= graph.steps:
            yield f"{where}: position {anchor.position} does not ascend from {last} within 0..{graph.steps}"
        if anchor.occurrence <= fired.get((anchor.kind, anchor.subject), 0):
            yield f"{where}: occurrence {anchor.occurrence} comes after a later one"
        if (anchor.kind is AnchorKind.ITERATION_END) != (number == len(graph.anchors) - 1):
            yield f"{where}: the last anchor, and no other, is iteration_end"
        last = anchor.position
        fired[anchor.kind, anchor.subject] = anchor.occurrence
    if last != graph.steps:
        yield f"field anchors: the last one stands at position {last}, not at the iteration's end, {graph.steps}"
