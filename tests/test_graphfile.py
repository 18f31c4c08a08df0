"""Graph files: what is written is read back, and what contradicts itself is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from handmade import GRAPH

from checkflow.errors import FormatError, InputError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.graphfile import (
    CollectiveRow,
    GraphAnchorRow,
    GraphDocument,
    GraphUnlistedRow,
    OpRow,
    TensorRow,
    graph_document,
    graph_fingerprint,
    json_schema,
    read_graph,
    state_fingerprint,
    write_graph,
)
from checkflow.jsonfile import digest_of, render

SCHEMA = Path(__file__).parent.parent / "graphs" / "graph.schema.json"


def test_graph_survives_the_round_trip(tmp_path: Path) -> None:
    """Every field of the hand-made graph comes back."""
    path = tmp_path / "graph.json"
    write_graph(path, GRAPH)
    assert read_graph(path) == GRAPH


def test_odd_values_survive_the_round_trip(tmp_path: Path) -> None:
    """Scalars, empty storages, tensors alive before the iteration, names that are not ASCII, every kind and role."""
    views = (View('modèle/\n"é"', "float16", ()), View("tied", "float16", (1, 0)))
    tensors = [Tensor("w", role, 0, 0, 7, views if role is Role.BUFFER else (View(role, "int8", (2**40,)),))
               for role in Role if role.is_state]  # fmt: skip
    tensors += [Tensor("", role, 2**62, 0, 0) for role in Role if not role.is_state]
    kinds = [kind for kind in AnchorKind if kind is not AnchorKind.ITERATION_END]
    anchors = [Anchor(kind, "m", 3, position) for position, kind in enumerate(kinds)]
    graph = Graph(
        model="", arguments=(("a", ""), ("b", "[1, 2]")), device="", traced_on="cuda",
        ops=(Op("", (), (0, 0), 2**60, 1, "complex64", 0), *(Op("x", (0, 0), (), 0, 0, "float32", 9),) * 6),
        tensors=tuple(tensors), anchors=(*anchors, Anchor(AnchorKind.ITERATION_END, "", 1, 7)),
        world_size=3, divided=True,
    )  # fmt: skip
    path = tmp_path / "graph.json"
    write_graph(path, graph)
    assert read_graph(path) == graph


def test_file_has_a_row_to_a_line_and_leaves_defaults_out(tmp_path: Path) -> None:
    """The bytes of a file are those that graphs/FORMAT.md promises."""
    path = tmp_path / "graph.json"
    write_graph(path, GRAPH)
    lines = path.read_text().splitlines()
    assert '  {"name": "x", "bytes": 200, "born": 1, "freed": 2},' in lines
    assert '  {"op": "aten.mul.Tensor", "reads": [0, 4], "flops": 200, "traffic_bytes": 300, "time_ns": 10},' in lines
    assert '  {"kind": "iteration_end", "position": 4}' in lines
    tables = (GRAPH.arguments, GRAPH.tensors, GRAPH.ops, GRAPH.anchors)
    assert len(lines) == 2 + 7 + sum(2 + len(rows) for rows in tables)  # braces, single fields, tables


def test_fingerprint_is_the_digest_in_the_file() -> None:
    """The graph's fingerprint and its file's digest are one thing, and timings are part of it."""
    assert graph_document(GRAPH)["digest"] == graph_fingerprint(GRAPH)
    assert graph_fingerprint(GRAPH.retimed("paper", [10, 10, 10, 11])) != graph_fingerprint(GRAPH)
    assert graph_fingerprint(replace(GRAPH)) == graph_fingerprint(GRAPH)


def test_state_fingerprint_is_of_names_shapes_and_dtypes_alone() -> None:
    """Another device, batch size, order or lifetime of activations changes nothing; another name, shape or tie does."""
    other = replace(GRAPH.retimed("h100", [1, 2, 3, 4]), arguments=(), tensors=GRAPH.tensors[3::-1] + GRAPH.tensors[4:])
    assert state_fingerprint(other) == state_fingerprint(GRAPH)
    first = GRAPH.tensors[0]
    for views in (
        (View("model/z", "uint8", (100,)),),
        (View("model/a", "int8", (100,)),),
        (View("model/a", "uint8", (10, 10)),),
        (*first.views, View("model/tied", "uint8", (100,))),
    ):
        changed = replace(GRAPH, tensors=(replace(first, views=views), *GRAPH.tensors[1:]))
        assert state_fingerprint(changed) != state_fingerprint(GRAPH)


def edited(**change: object) -> str:
    """The hand-made graph's file with other fields, under a digest that is right."""
    document = graph_document(GRAPH) | change
    content = {key: value for key, value in document.items() if key not in ("format", "version", "digest")}
    return render(document | {"digest": digest_of(content)} | {k: v for k, v in change.items() if k == "digest"})


def with_row(table: str, number: int, **change: object) -> str:
    """The same with other fields in one row; None takes a field out."""
    found = graph_document(GRAPH)[table]
    assert isinstance(found, list)
    row = {key: value for key, value in (found[number] | change).items() if value is not None}
    return edited(**{table: [*found[:number], row, *found[number:][1:]]})


def ops(*rows: tuple[list[int], list[int]], born: tuple[int, ...]) -> str:
    """A graph of operators that read and write tensors, given the steps that create these."""
    steps = len(rows)
    return edited(
        ops=[{"op": f"op{number}", "reads": r, "writes": w} for number, (r, w) in enumerate(rows, start=1)],
        tensors=[{"name": f"t{i}", "bytes": 1, "born": b, "freed": steps} for i, b in enumerate(born)],
        anchors=[{"kind": "iteration_end", "position": steps}],
    )


MALFORMED: dict[str, tuple[str, str]] = {
    "empty": ("", "is not JSON or is cut short"),
    "not JSON": ("model: bert", "is not JSON or is cut short"),
    "cut short": (edited()[:-200], "is not JSON or is cut short"),
    "a list": ("[]", "is not a checkflow-graph file"),
    "a schedule": (edited(format="checkflow-schedule"), "its field 'format' has to say 'checkflow-graph'"),
    "no format": ("{}", "its field 'format' has to say"),
    "a later version": (edited(version=2), "version 2 is not supported, only 1"),
    "version true": (edited(version=True), "version True is not supported"),
    "version as text": (edited(version="1"), "version '1' is not supported"),
    "unknown field": (edited(colour="red"), "field colour: extra inputs are not permitted"),
    "unknown field in a row": (with_row("ops", 1, colour="red"), r"field ops\.1\.colour: extra inputs"),
    "missing field": (with_row("tensors", 1, freed=None), r"field tensors\.1\.freed: field required"),
    "field twice": (edited().replace('"model"', '"device"'), "a key stands twice"),
    "NaN": (edited().replace('"time_ns": 10', '"time_ns": NaN', 1), "NaN is not JSON"),
    "true as a number": (with_row("ops", 0, flops=True), r"field ops\.0\.flops: input should be a valid integer"),
    "fraction": (with_row("ops", 0, flops=1.5), r"field ops\.0\.flops: input should be a valid integer"),
    "number as text": (with_row("ops", 0, flops="1"), r"field ops\.0\.flops: input should be a valid integer"),
    "text as a list": (with_row("ops", 0, reads="12"), r"field ops\.0\.reads: "),
    "unknown role": (with_row("tensors", 0, role="weight"), r"field tensors\.0\.role: "),
    "unknown kind": (with_row("anchors", 0, kind="step"), r"field anchors\.0\.kind: "),
    "negative size": (with_row("tensors", 0, bytes=-1), r"field tensors\.0\.bytes: .*greater than or equal to 0"),
    "negative time": (with_row("ops", 0, time_ns=-1), r"field ops\.0\.time_ns: .*greater than or equal to 0"),
    "negative flops": (with_row("ops", 0, flops=-1), r"field ops\.0\.flops: "),
    "negative traffic": (with_row("ops", 0, traffic_bytes=-1), r"field ops\.0\.traffic_bytes: "),
    "negative birth": (with_row("tensors", 4, born=-1), r"field tensors\.4\.born: "),
    "negative index": (with_row("ops", 0, reads=[-1]), r"field ops\.0\.reads\.0: "),
    "negative shape": (
        with_row("tensors", 0, views=[{"name": "model/a", "dtype": "uint8", "shape": [-1]}]),
        r"field tensors\.0\.views\.0\.shape\.0: ",
    ),
    "negative position": (with_row("anchors", 0, position=-1), r"field anchors\.0\.position: "),
    "occurrence nought": (with_row("anchors", 0, occurrence=0), r"field anchors\.0\.occurrence: "),
    "negative host state": (edited(host_state_bytes=-1), "field host_state_bytes: "),
    "no operators": (edited(ops=[]), "field ops: "),
    "no anchors": (edited(anchors=[]), "field anchors: "),
    "freed before it is born": (with_row("tensors", 4, born=3), r"field tensors\.4 \('x'\): lives from 3 to 2"),
    "freed after the end": (with_row("tensors", 5, freed=5), r"field tensors\.5 \('y'\): lives from 3 to 5"),
    "state born late": (with_row("tensors", 3, born=1), r"field tensors\.3 \('model/frozen'\): is state, which lives"),
    "state freed early": (with_row("tensors", 3, freed=3), r"field tensors\.3 \('model/frozen'\): is state, which"),
    "state without a view": (with_row("tensors", 3, views=None), r"field tensors\.3 .*has 0 views"),
    "activation with a view": (
        with_row("tensors", 4, views=[{"name": "x", "dtype": "uint8", "shape": []}]),
        r"field tensors\.4 .*has 1 views",
    ),
    "name of two storages": (
        with_row("tensors", 3, views=[{"name": "model/a", "dtype": "uint8", "shape": []}]),
        r"field tensors\.3 .*the name 'model/a' stands for two storages",
    ),
    "tensor that is not there": (with_row("ops", 3, reads=[6]), r"field ops\.3 \(step 4, .*tensor 6 is not one of"),
    "written tensor that is not there": (with_row("ops", 3, writes=[99]), r"field ops\.3 .*tensor 99 is not one of"),
    "too early and, later, not there": (
        ops(([1], [0]), ([2], [1]), born=(1, 2)),
        r"field ops\.1 \(step 2, 'op2'\): tensor 2 is not one of the 2 tensors",
    ),
    "read after it is freed": (with_row("ops", 2, reads=[4]), r"field ops\.2 \(step 3, .*uses tensor 4 \('x'\)"),
    "written before its birth": (with_row("ops", 1, writes=[5]), r"field ops\.1 .*only from step 3 to 3"),
    "read before its birth": (
        ops(([1], [0]), ([], [1]), born=(1, 2)),
        r"field ops\.0 \(step 1, 'op1'\): is out of order: it reads tensor 1 \('t1'\), which step 2 creates",
    ),
    "reads what it creates": (ops(([0], [0]), born=(1,)), r"field ops\.0 .*the graph has a cycle: steps 1 -> 1"),
    "cycle": (
        ops(([], [3]), ([2, 3], [0]), ([0], [1]), ([1], [2]), born=(2, 3, 4, 1)),
        r"field ops\.1 \(step 2, 'op2'\): the graph has a cycle: steps 2 -> 3 -> 4 -> 2",
    ),
    "anchors out of order": (with_row("anchors", 0, position=3), r"field anchors\.1 .*position 2 does not ascend"),
    "anchors at one position": (with_row("anchors", 0, position=2), r"field anchors\.1 .*position 2 does not ascend"),
    "anchor after the end": (with_row("anchors", 2, position=5), r"field anchors\.2 .*position 5 does not ascend"),
    "end before the end": (with_row("anchors", 2, position=3), r"field anchors: the last one stands at position 3"),
    "last anchor of another kind": (with_row("anchors", 2, kind="optimizer"), r"field anchors\.2 .*iteration_end"),
    "two ends": (with_row("anchors", 1, kind="iteration_end"), r"field anchors\.1 .*iteration_end"),
    "occurrences out of order": (
        edited(
            anchors=[
                {"kind": "forward", "subject": "m", "occurrence": 2, "position": 1},
                {"kind": "forward", "subject": "m", "position": 2},
                {"kind": "iteration_end", "position": 4},
            ]
        ),
        r"field anchors\.1 .*occurrence 1 comes after a later one",
    ),
    "no digest": (edited().replace('"digest"', '"digester"'), "field digest"),
    "digest of another kind": (edited(digest="sha1:00"), "field digest: string should match"),
    "digest of something else": (edited(digest="sha256:" + "0" * 64), "field digest: is not the digest"),
    "content changed": (edited().replace('"model": "handmade"', '"model": "headmade"'), "field digest: is not the"),
}


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """The line names the file, the field and what is wrong."""
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=message) as raised:
        read_graph(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_white_space_key_order_and_written_out_defaults_do_not_matter(tmp_path: Path) -> None:
    """A file that says the same in other words is the same graph."""
    document = graph_document(GRAPH)
    tensors = document["tensors"]
    assert isinstance(tensors, list)
    document["tensors"] = [{"born": 0, "role": "activation", "views": []} | row for row in tensors]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(dict(reversed(document.items())), indent=4))
    assert read_graph(path) == GRAPH


@pytest.mark.parametrize("make", [Path.exists, Path.mkdir], ids=["missing", "folder"])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """No such file, or a folder, is one line too."""
    path = tmp_path / "graph.json"
    make(path)
    with pytest.raises(InputError, match=r"graph\.json: cannot be read"):
        read_graph(path)


def test_json_schema_is_current_and_accepts_a_file(tmp_path: Path) -> None:
    """graphs/graph.schema.json is what the types say, and a written graph validates against it."""
    schema = json.loads(SCHEMA.read_text())
    assert schema == json_schema(), "write it again as graphs/FORMAT.md says"
    jsonschema.Draft202012Validator.check_schema(schema)
    path = tmp_path / "graph.json"
    write_graph(path, GRAPH)
    jsonschema.validate(json.loads(path.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(edited(colour="red")), schema)


def test_format_page_names_every_field_and_its_rows_are_rows() -> None:
    """graphs/FORMAT.md shows rows that a reader accepts, and leaves no field out."""
    text = (SCHEMA.parent / "FORMAT.md").read_text()
    shown = [json.loads(line) for line in text.splitlines() if line.startswith("    {")]
    for model in (TensorRow, OpRow, CollectiveRow, GraphAnchorRow, GraphUnlistedRow):
        examples = [row for row in shown if row.keys() <= model.model_fields.keys()]
        assert examples, f"no row is a {model.__name__}"
        for row in examples:
            model.model_validate_json(json.dumps(row))
        shown = [row for row in shown if row not in examples]
    assert shown == []
    models = TensorRow, OpRow, CollectiveRow, GraphAnchorRow, GraphUnlistedRow, GraphDocument
    fields = [field for model in models for field in model.model_fields]
    assert [field for field in fields if f"`{field}`" not in text] == []
