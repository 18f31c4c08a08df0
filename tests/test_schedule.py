"""Schedule files: what is written is read back, and whatever else a file says is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from handmade import EASY, GRAPH, PAUSED, TIGHT
from mutants import SETTINGS
from pydantic import BaseModel, ValidationError

from checkflow.errors import FormatError, InputError
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.jsonfile import digest_of, render
from checkflow.schedule import (
    ActionRow,
    AnchorRow,
    Certificate,
    GradientRow,
    Schedule,
    StateRow,
    UnlistedRow,
    ViewRow,
    complaints,
    json_schema,
    read_schedule,
    schedule_digest,
    schedule_document,
    sealed,
    write_schedule,
)
from checkflow.verify import verify

SCHEMA = Path(__file__).parent.parent / "schedules" / "schedule.schema.json"


@pytest.mark.parametrize("schedule", [EASY, TIGHT], ids=["easy", "tight"])
def test_schedule_survives_the_round_trip(tmp_path: Path, schedule: Schedule) -> None:
    """Every field comes back, with and without snapshots."""
    path = tmp_path / "schedule.json"
    write_schedule(path, schedule)
    assert read_schedule(path) == schedule


def test_writing_seals_the_schedule(tmp_path: Path) -> None:
    """A schedule without its digest gets it, and sealing it twice changes nothing."""
    path = tmp_path / "schedule.json"
    write_schedule(path, TIGHT.model_copy(update={"digest": ""}))
    assert read_schedule(path) == TIGHT == sealed(TIGHT)
    assert TIGHT.digest == schedule_digest(TIGHT)


def test_file_has_a_row_to_a_line(tmp_path: Path) -> None:
    """The bytes of a file are those that schedules/FORMAT.md promises."""
    path = tmp_path / "schedule.json"
    write_schedule(path, TIGHT)
    lines = path.read_text().splitlines()
    assert '  {"tensor": 1, "offset": 0, "bytes": 80, "offload": [0, 2]},' in lines
    assert (
        '  {"tensor": 2, "offset": 0, "bytes": 50, "snapshot": [1, 2], "offload": [1, 2], "release": [2, 2]}' in lines
    )
    assert ' "chunk_bytes": null,' in lines


def test_places_are_unrolled_as_the_model_says() -> None:
    """(i, a) stands at (i - 1)·T + position(a)."""
    assert [TIGHT.position(place) for place in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 3))] == [-4, -2, 0, 0, 2, 8]


def edited(**change: object) -> str:
    """The tight schedule's file with other fields, under a digest that is right."""
    document = schedule_document(TIGHT) | change
    content = {key: value for key, value in document.items() if key != "digest"}
    return render(document | {"digest": change.get("digest", digest_of(content))})


def with_row(table: str, number: int, **change: object) -> str:
    """The same with other fields in one row; None takes a field out."""
    found = schedule_document(TIGHT)[table]
    assert isinstance(found, list)
    row = {key: value for key, value in (found[number] | change).items() if value is not None}
    return edited(**{table: [*found[:number], row, *found[number:][1:]]})


def moving(*rows: ActionRow) -> str:
    """The same with these actions."""
    return edited(actions=schedule_document(TIGHT.model_copy(update={"actions": rows}))["actions"])


def without(field: str) -> str:
    return render({key: value for key, value in json.loads(edited()).items() if key != field})


CERTIFICATE = TIGHT.certificate.model_dump()
FINE = {
    "another model": edited(model="other"),
    "largest chunk": edited(chunk_bytes=4096),
    "row with a null": edited(actions=[row.model_dump(mode="json") for row in TIGHT.actions]),
}
MALFORMED: dict[str, tuple[str, str]] = {
    "empty": ("", "is not JSON or is cut short"),
    "not JSON": ("PK\x03\x04", "is not JSON or is cut short"),
    "cut short": (edited()[:-200], "is not JSON or is cut short"),
    "a graph": (edited(format="checkflow-graph"), "its field 'format' has to say 'checkflow-schedule'"),
    "a later version": (edited(version=3), "version 3 is not supported, only 1 and 2"),
    "unknown field": (edited(colour="red"), "field colour: extra inputs are not permitted"),
    "unknown field in a row": (with_row("actions", 1, colour="red"), r"field actions\.1\.colour: extra inputs"),
    "unknown field in the certificate": (edited(certificate=CERTIFICATE | {"seal": 1}), r"field certificate\.seal: "),
    "name that breaks lines": (edited(**{"a\nb": 1}), "field a b: extra inputs"),
    "missing field": (without("bandwidth_bytes_per_s"), "field bandwidth_bytes_per_s: field required"),
    "missing digest": (without("digest"), "field digest: is not the digest"),
    "fraction": (edited(interval=1.5), "field interval: input should be a valid integer"),
    "true as a number": (edited(interval=True), "field interval: input should be a valid integer"),
    "number as text": (edited(interval="1"), "field interval: input should be a valid integer"),
    "no interval": (edited(interval=0), "field interval: "),
    "no bandwidth": (edited(bandwidth_bytes_per_s=0), "field bandwidth_bytes_per_s: "),
    "all slack": (edited(slack_ppm=1_000_000), "field slack_ppm: "),
    "negative slack": (edited(slack_ppm=-1), "field slack_ppm: "),
    "unknown formulation": (edited(formulation="milp"), "field formulation: string should match"),
    "unknown transfers": (edited(transfers="streaming\n"), "field transfers: string should match"),
    "negative gap": (edited(certificate=CERTIFICATE | {"gap": -0.1}), r"field certificate\.gap: "),
    "endless gap": (edited().replace('"gap": 0.0', '"gap": Infinity'), "Infinity is not JSON"),
    "huge gap": (edited().replace('"gap": 0.0', '"gap": 1e999'), "1e999 is larger than any number here"),
    "empty chunk": (with_row("actions", 0, bytes=0), r"field actions\.0\.bytes: "),
    "negative offset": (with_row("actions", 0, offset=-10), r"field actions\.0\.offset: "),
    "anchor nought": (with_row("actions", 0, offload=[0, 0]), r"field actions\.0\.offload\.1: "),
    "iteration before the checkpoint's": (
        with_row("actions", 0, offload=[-9, 1]),
        r"field actions\.0: iteration -9 is before those of a checkpoint",
    ),
    "value of an earlier checkpoint": (with_row("actions", 0, back=9), r"field actions\.0\.back: 9 is not one of"),
    "gradient that is state": (
        edited(gradients=[{"id": 0, "bytes": 1, "parameter": {"name": "p", "dtype": "uint8", "shape": [1]}}]),
        "field gradients: has the id of state",
    ),
    "until an anchor that is not there": (
        edited(
            gradients=[{"id": 9, "bytes": 1, "until": 4, "parameter": {"name": "p", "dtype": "uint8", "shape": [1]}}]
        ),
        r"field gradients\.0\.until: anchor 4 is not one of",
    ),
    "place of three numbers": (with_row("actions", 0, offload=[0, 1, 2]), r"field actions\.0\.offload: "),
    "place of one number": (with_row("actions", 0, offload=1), r"field actions\.0\.offload: "),
    "unknown kind of anchor": (with_row("anchors", 0, kind="step"), r"field anchors\.0\.kind: "),
    "no anchors": (edited(anchors=[]), "field anchors: positions have to ascend"),
    "anchors out of order": (with_row("anchors", 0, position=3), "field anchors: positions have to ascend"),
    "end before the end": (with_row("anchors", 2, position=3), "field anchors: positions have to ascend"),
    "anchor that is not there": (with_row("actions", 0, offload=[0, 4]), r"field actions\.0: anchor 4 is not one of"),
    "tensor that is not there": (
        with_row("actions", 0, tensor=9),
        r"field actions\.0\.tensor: 9 is not the id",
    ),
    "unwritten tensor": (with_row("actions", 0, tensor=3), r"field actions\.0\.tensor: 3 is not the id of written"),
    "past the tensor's end": (with_row("actions", 0, offset=80), r"field actions\.0: ends at byte 160 of 150"),
    "bytes that no row moves": (
        moving(*TIGHT.actions[1:]),
        r"field actions: bytes 0\.\.80 of model/b are moved by no row",
    ),
    "state that no row moves": (
        moving(*(row for row in TIGHT.actions if row.tensor != 2)),
        r"field actions: bytes 0\.\.50 of optimizer/a\.c are moved by no row",
    ),
    "last bytes that no row moves": (
        with_row("actions", 1, bytes=60),
        r"field actions: bytes 140\.\.150 of model/b are moved by no row",
    ),
    "bytes that two rows move": (
        with_row("actions", 1, offset=70),
        r"field actions: bytes 70\.\.80 of model/b are moved twice",
    ),
    "parts of two iterations": (
        with_row("actions", 1, back=1),
        r"field actions: bytes 80\.\.150 of model/b are moved by no row",
    ),
    "state without a name": (with_row("state", 0, views=[]), r"field state\.0\.views: tuple should have at least 1"),
    "the same id twice": (with_row("state", 1, id=0), "field state: has an id twice"),
    "snapshot never released": (with_row("actions", 1, release=None), r"field actions\.1: snapshot and release stand"),
    "digest of something else": (edited(digest="sha256:" + "0" * 64), "field digest: is not the digest"),
    "content changed": (edited().replace('"bytes": 90', '"bytes": 80'), "field digest: is not the digest"),
}


@pytest.mark.parametrize("text", FINE.values(), ids=FINE)
def test_well_formed_file_is_read(tmp_path: Path, text: str) -> None:
    """Reading asks for form only; nulls that are written out, or white space, are no change."""
    path = tmp_path / "schedule.json"
    document = json.loads(text)
    path.write_text(text)
    if "snapshot" in document["actions"][0]:
        document["digest"] = TIGHT.digest
        path.write_text(json.dumps(document))
    assert read_schedule(path).actions == TIGHT.actions


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """The line names the file, the field and what is wrong."""
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=message) as raised:
        read_schedule(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_every_bit_of_the_content_is_under_the_digest(tmp_path: Path) -> None:
    """A digit changed anywhere makes the file unreadable."""
    path = tmp_path / "schedule.json"
    text = edited()
    for place, letter in enumerate(text):
        if letter in "0123456789":
            path.write_text(text[:place] + ("1" if letter != "1" else "2") + text[place + 1 :])
            with pytest.raises(FormatError):
                read_schedule(path)


def in_lanes(*backs: tuple[int, int], lanes: int = 2, replica: bool = False, size_bytes: int = 100) -> Schedule:
    """Whole rows of a, b, c and the gradient of a (tensor 9), each of so many iterations before the checkpoint's."""
    view = {"name": "model/a", "dtype": "uint8", "shape": (100,)}
    sizes = {0: 100, 1: 150, 2: 50, 9: size_bytes}
    rows = (
        {"tensor": tensor, "offset": 0, "bytes": sizes[tensor], "back": back, "offload": (0, 3)}
        for tensor, back in backs
    )
    return EASY.model_copy(
        update={
            "lanes": lanes,
            "replica": replica,
            "gradients": (GradientRow(id=9, bytes=size_bytes, parameter=ViewRow.model_validate(view)),),
            "actions": tuple(ActionRow.model_validate(row) for row in rows),
        }
    )


A0, A1, B0, B1, C0, C1, G0, G1 = ((tensor, back) for tensor in (0, 1, 2, 9) for back in (0, 1))


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        (in_lanes(A0, B0, B1, C0, G1), ""),
        (in_lanes(A1, B0, B1, C1, G0), ""),
        (in_lanes(B0, G0, lanes=1, replica=True), ""),
        (in_lanes(A0, B0, B1, C0, G0), "gradient of model/a is of [0] iterations before; those of [1] go along"),
        (in_lanes(A0, B0, B1, C0, G0, G1), "gradient of model/a is of [0, 1] iterations before; those of [1] go along"),
        (in_lanes(A0, B0, B1, C0), "gradient of model/a is of [] iterations before; those of [1] go along"),
        (in_lanes(A0, A1, B0, B1, C0, G1), "gradient of model/a is of [1] iterations before; those of [] go along"),
        (in_lanes(A0, C0, G1), "bytes 0..150 of model/b are moved by no row"),
        (in_lanes(A0, B0, B1, B1, C0, G1), "bytes 0..150 of model/b are moved twice"),
        (in_lanes(A0, B0, B1, C0, G1, lanes=3), "model/b is of [0, 1] iterations before, and has to be of one"),
        (in_lanes(A0, B0, B1, C0, G1, size_bytes=90), "gradient of model/a has 90 bytes, and 100 leave"),
        (in_lanes(B0, lanes=1, replica=True), "gradient of model/a is of [] iterations before; those of [0] go along"),
        (in_lanes(A0, B0, C0, G0, lanes=1, replica=True), "gradient of model/a is of [0] iterations before; those"),
    ],
)  # fmt: skip
def test_what_each_checkpoint_needs_is_moved_once(schedule: Schedule, complaint: str) -> None:
    """In lanes, or for a replica: what gradients rebuild in one, its gradients in the others, all else in each."""
    found = list(complaints(schedule))
    assert bool(found) == bool(complaint)
    assert not found or complaint in found[0]


def test_types_are_strict_and_frozen() -> None:
    """Wrong types are refused where they are made, and nothing is changed in place."""
    with pytest.raises(ValidationError):
        ActionRow.model_validate({"tensor": "1", "offset": 0, "bytes": 1, "offload": (0, 1)})
    with pytest.raises(ValidationError):
        ActionRow(tensor=0, offset=0, bytes=1, offload=(0, 0))
    with pytest.raises(ValidationError):
        TIGHT.interval = 2


def test_unwritable_output_is_one_line(tmp_path: Path) -> None:
    """A folder that does not exist is named, and nothing is left behind."""
    with pytest.raises(InputError, match=r"missing/schedule\.json: cannot be written"):
        write_schedule(tmp_path / "missing" / "schedule.json", TIGHT)
    assert list(tmp_path.iterdir()) == []


def test_json_schema_is_current_and_accepts_a_file(tmp_path: Path) -> None:
    """schedules/schedule.schema.json is what the types say; written schedules validate, strange ones do not."""
    schema = json.loads(SCHEMA.read_text())
    assert schema == json_schema(), "write it again as schedules/FORMAT.md says"
    jsonschema.Draft202012Validator.check_schema(schema)
    for schedule in (EASY, TIGHT):
        path = tmp_path / "schedule.json"
        write_schedule(path, schedule)
        jsonschema.validate(json.loads(path.read_text()), schema)
    for text in (edited(colour="red"), edited(version=3), without("digest"), with_row("actions", 0, bytes=0)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(text), schema)


def test_format_page_names_every_field_and_its_rows_are_rows() -> None:
    """schedules/FORMAT.md shows rows that a reader accepts, and leaves no field out."""
    text = (SCHEMA.parent / "FORMAT.md").read_text()
    shown = [json.loads(line) for line in text.splitlines() if line.startswith("    {")]
    rows: list[type[BaseModel]] = [StateRow, AnchorRow, ActionRow, GradientRow, UnlistedRow]
    for model in rows:
        examples = [row for row in shown if row.keys() <= model.model_fields.keys()]
        assert examples, f"no row is a {model.__name__}"
        for row in examples:
            model.model_validate_json(json.dumps(row))
        shown = [row for row in shown if row not in examples]
    assert shown == []
    rows += [Certificate, Schedule]
    fields = [field for model in rows for field in model.model_fields]
    assert [field for field in fields if f"`{field}`" not in text] == []


VERSION1 = Path(__file__).parent / "version1"  # files as the first version wrote them


@pytest.mark.parametrize(
    ("name", "graph"), [("tight", GRAPH), ("coarse", SETTINGS["coarse"].graph), ("alexnet-1", None)]
)
def test_a_file_of_version_1_is_read_as_what_it_ran(name: str, graph: Graph | None, tmp_path: Path) -> None:
    """Its actions and what they need stay, and verify; its bound was another plan's, and is not claimed."""
    old = json.loads((VERSION1 / f"{name}.json").read_text())
    schedule = read_schedule(VERSION1 / f"{name}.json")
    found = schedule_document(schedule)
    assert all(found[field] == old[field] for field in old.keys() - {"version", "digest", "certificate", "plan"})
    claims, claimed = schedule.certificate, old["certificate"]
    assert claims.peak_bytes == claimed["executed_peak_bytes"]
    assert claims.snapshot_bytes == claimed["executed_snapshot_bytes"]
    assert claims.ideal_peak_bytes == (None if name == "coarse" else claimed["lower_bound_bytes"])
    assert claims.lower_bound_bytes is claims.gap is None
    traced = graph or read_graph(SCHEMA.parent.parent / "graphs" / f"{name}.json")
    then = replace(
        traced, tensors=tuple(replace(one, of="") for one in traced.tensors)
    )  # it did not say whose they are
    verified = verify(schedule, then)
    assert verified.lower_bound_bytes <= verified.peak_bytes == claims.peak_bytes
    write_schedule(tmp_path / "now.json", schedule)
    assert read_schedule(tmp_path / "now.json") == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interval": 3}, "field digest: is not the digest of this content"),
        ({"version": True}, "version True is not supported, only 1 and 2"),
        ({"certificate": {}}, "field certificate: field training_peak_bytes: field required"),
        ({"certificate": None}, "field certificate: "),
        ({"certificate": CERTIFICATE}, "field version: says 1, and its certificate is of version 2; compile it again"),
        ({"colour": "red"}, "field colour: extra inputs"),
        ({"state": []}, r"field actions\.0\.tensor: 1 is not the id"),
    ],
)
def test_a_wrong_file_of_version_1_is_refused_in_one_line(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Also under a digest that is right, but for the first."""
    document = json.loads((VERSION1 / "tight.json").read_text()) | change
    if "interval" not in change:
        document["digest"] = digest_of({key: value for key, value in document.items() if key != "digest"})
    (tmp_path / "old.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match=message) as raised:
        read_schedule(tmp_path / "old.json")
    assert "\n" not in str(raised.value)


def test_what_does_not_pause_has_the_digest_that_it_had_before_pauses() -> None:
    """Who holds such a file, or a checkpoint of it, holds it still."""
    assert EASY.digest == "sha256:3a83b2cf95fba8b3ba4a0615acd1f5fab96f3fbcac40fb9d46f022c53cd8872c"
    assert TIGHT.digest == "sha256:beca3f517bdc0881a217cb25bca6dec0e79574e8a073f0e75c218aa6264ca3bc"
    document = schedule_document(EASY)
    assert not {"policy", "pause"} & document.keys()
    assert "pause_ns" not in EASY.certificate.model_dump(exclude_defaults=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pause": [1, 4]}, "field pause: anchor 4 is not one of the 3"),
        ({"pause": [1, 0]}, "pause.1"),
        ({"pause": [1]}, "pause"),
        ({"policy": "Check Freq"}, "policy"),
    ],
)
def test_a_pause_that_makes_no_sense_is_refused_in_one_line(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """The field is named."""
    document = schedule_document(PAUSED) | change
    document["digest"] = digest_of({name: value for name, value in document.items() if name != "digest"})
    (tmp_path / "s.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match=message) as error:
        read_schedule(tmp_path / "s.json")
    assert "\n" not in str(error.value)


def test_a_paused_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With the pause under its digest."""
    write_schedule(tmp_path / "s.json", PAUSED)
    assert read_schedule(tmp_path / "s.json") == PAUSED
    assert sealed(PAUSED.model_copy(update={"pause": (1, 1)})).digest != PAUSED.digest
    assert sealed(PAUSED.model_copy(update={"policy": "synchronous"})).digest != PAUSED.digest
