"""torch.distributed.checkpoint saves to a store from one process: what comes back, and what is refused."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from saving import checkpoints, loaded, refused, saved
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import checkflow
from checkflow.cli import run
from checkflow.dtypes import CODES
from checkflow.state.host.record import parse_record

MiB = 2**20


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """torch warns that one process is no group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


def test_tensors_of_each_dtype_and_shape_come_back(tmp_path: Path) -> None:
    """Bit by bit: NaNs with their payloads, and more than one piece of 16 MiB."""
    state: dict[str, object] = {}
    for name in CODES:
        dtype = getattr(torch, name)
        bits = torch.randint(0, 2 if name == "bool" else 256, (3, 5 * dtype.itemsize), dtype=torch.uint8)
        state[name] = bits.view(dtype)
    state |= {
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 4),
        "large": torch.randint(0, 256, (17 * MiB + 3,), dtype=torch.uint8),
        "turned": torch.arange(24).reshape(4, 6).t(),
        "part of another": torch.arange(100.0)[10:90:7],
        "conjugate": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    saved(tmp_path, state)
    tensors = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    found = loaded(tmp_path, {key: tensor.resolve_conj() for key, tensor in tensors.items()})
    for key, value in state.items():
        other = found[key]
        assert isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        bits, others = (
            each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (value, other)
        )
        assert value.dtype == other.dtype and torch.equal(bits, others), key


def test_other_values_come_back_as_they_are(tmp_path: Path) -> None:
    values: dict[str, object] = {
        "none": None, "flag": True, "count": 2**70, "rate": -0.0, "infinite": float("-inf"), "text": "é\n\0",
        "bytes": b"\x80\x04", "tuple": (1, [2, {3}]), "dtype": torch.bfloat16, "array": np.arange(3),
        "ordered": ({}, OrderedDict([("b", 1)])), "": "no key", "$tag": ({"$tag": 1},), "a.b": 1,
    }  # fmt: skip
    saved(tmp_path, {"state": values, "list": [torch.ones(1), "x"]})
    found = loaded(tmp_path, {"state": dict.fromkeys(values), "list": [torch.zeros(1), ""]})
    other = found["state"]
    assert isinstance(other, dict)
    assert repr(other) == repr(values)
    assert found["list"] == [torch.ones(1), "x"]


def test_nothing_from_the_disk_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner unpickles was pickled here, of values that JSON has; no file has a pickle."""
    saved(tmp_path, {"value": {"epoch": 3}, "weight": torch.ones(2)})
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"\x80\x02" in path.read_bytes()[:512]]
    given: list[bytes] = []

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: object, value: io.BytesIO) -> None:
            given.append(value.getvalue())
            super().load_bytes(read_item, value)  # type: ignore[arg-type]

    assert loaded(tmp_path, {"value": {"epoch": 0}}, planner=Planner())["value"] == {"epoch": 3}
    assert torch.load(io.BytesIO(given[0]), weights_only=True) == 3
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(torch, "load", lambda *_args, **_kwargs: 3)
    assert loaded(tmp_path, {"value": {"epoch": 0}})["value"] == {"epoch": 3}


def test_some_of_it_and_all_of_it(tmp_path: Path) -> None:
    """The planner's own errors stay; what it keeps of nested keys comes back."""
    state: dict[str, object] = {"model": {"a.b": torch.ones(2), "c": {1: torch.zeros(3)}}, "epoch": 4}
    saved(tmp_path, state)
    some: dict[str, object] = {"model": {"a.b": torch.zeros(2)}}
    assert loaded(tmp_path, some)["model"]["a.b"].tolist() == [1, 1]  # type: ignore[index]
    with pytest.raises(CheckpointException, match="other"):
        loaded(tmp_path, {"other": torch.ones(1)})
    partial = loaded(tmp_path, {"other": 1, "epoch": 0}, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert partial == {"other": 1, "epoch": 4}
    whole = _load_state_dict_from_keys(storage_reader=checkflow.StoreReader(tmp_path))
    assert whole["model"]["c"]["1"].tolist() == [0, 0, 0] and whole["epoch"] == 4
    assert _load_state_dict_from_keys("epoch", storage_reader=checkflow.StoreReader(tmp_path)) == {"epoch": 4}


def test_what_attach_saved_is_rebuilt_from_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with checkflow.attach(model, torch.optim.SGD(model.parameters()), store=tmp_path) as checkpointer:
        checkpointer.step()
    whole = _load_state_dict_from_keys(storage_reader=checkflow.StoreReader(tmp_path))
    assert torch.equal(whole["model"]["weight"], model.weight)


def test_each_save_is_the_next_checkpoint(tmp_path: Path) -> None:
    """None is removed or overwritten; the one saved last is the newest, whatever its iteration."""
    store = tmp_path / "a" / "store"
    writer = checkflow.StoreWriter(store)
    for epoch in range(3):
        save({"epoch": epoch}, storage_writer=writer)
    save({"epoch": 3}, storage_writer=checkflow.StoreWriter(store))
    later = checkflow.StoreWriter(store, iteration=2)
    save({"epoch": 4}, storage_writer=later)
    save({"epoch": 5}, storage_writer=later)
    iterations = [name.split("-")[-1] for name in checkpoints(store)]
    assert iterations == ["1", "2", "3", "4", "2", "3"]
    reader = checkflow.StoreReader(store)
    told = reader.read_metadata().storage_meta
    assert told is not None and later.save_id == "00000006-iteration-3"
    assert (told.checkpoint_id, told.save_id, told.load_id) == (store, later.save_id, reader.load_id)
    state: dict[str, object] = {"epoch": -1}
    load(state, storage_reader=reader)
    assert state == {"epoch": 5}
    save({"epoch": 6}, storage_writer=later)
    load(state, storage_reader=reader)  # which looks again
    assert state == {"epoch": 6}
    assert loaded(store, {"epoch": -1}, 2) == {"epoch": 4}
    assert loaded(store, {"epoch": -1}, 1) == {"epoch": 0}
    save({"epoch": 7}, storage_writer=later, checkpoint_id=tmp_path / "b")
    assert checkpoints(tmp_path / "b") == ["00000001-iteration-1"]


def test_a_save_does_not_take_longer_the_more_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is there only the newest is read."""
    from checkflow.distributed import parts

    read: list[object] = []

    def parsed(data: bytes) -> object:
        read.append(data)
        return parse_record(data)

    writer = checkflow.StoreWriter(tmp_path)
    for epoch in range(4):
        save({"epoch": epoch}, storage_writer=writer)
    monkeypatch.setattr(parts, "parse_record", parsed)
    save({"epoch": 4}, storage_writer=writer)
    assert len(read) == 1
    assert checkpoints(tmp_path)[-1] == "00000005-iteration-5"


def test_the_commands_know_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    saved(store, {"weight": torch.arange(3.0), "epoch": 3})
    assert run(["list", str(store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["iteration"] == 1
    assert run(["check", str(store)]) == 0
    assert run(["export", str(store), "--to", "dcp", "-o", str(tmp_path / "dcp")]) == 0
    state = {"state": {"weight": torch.zeros(3)}}
    load(state, checkpoint_id=tmp_path / "dcp")
    assert state["state"]["weight"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["state.safetensors", "commit.json", "manifest.json"])
def test_a_flipped_bit_is_refused(name: str, tmp_path: Path) -> None:
    """In each file, at its beginning, in its middle, and at its end."""
    saved(tmp_path, {"weight": torch.arange(3.0), "epoch": 3})
    (path,) = tmp_path.glob(f"*/{name}")
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointException, match=r"not what was written|has no such checkpoint"):
            loaded(tmp_path, {"weight": torch.zeros(3), "epoch": 0})
    path.write_bytes(whole)
    assert loaded(tmp_path, {"epoch": 0}) == {"epoch": 3}


def test_text_of_a_name_that_is_no_utf8_comes_back(tmp_path: Path) -> None:
    saved(tmp_path, {"file": "shard\udc80"})
    assert loaded(tmp_path, {"file": ""}) == {"file": "shard\udc80"}


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "an object": ({"a": {"b": object()}}, "a.b: a object cannot be saved"),
    "a function": ({"a": [print]}, r"a\[0\]: a function cannot be saved"),
    "a module": ({"a": {"b": torch.nn.Identity()}}, "a.b: a .*Identity cannot be saved"),
    "a dtype of no file": ({"a": torch.ones(2, dtype=torch.complex128)}, "a: dtype complex128 cannot be stored"),
    "a sparse tensor": ({"a": torch.ones(2).to_sparse()}, "a: layout torch.sparse_coo is not supported"),
    "no data": ({"a": torch.ones(2, device="meta")}, r"a: has no data yet \(meta device\)"),
    "a key of no file": ({"\udc80": torch.ones(1)}, "the key .* is no text that a file can hold; rename it"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_in_a_line(what: str, tmp_path: Path) -> None:
    """And the checkpoint before stays, and is the only one."""
    saved(tmp_path, {"epoch": 1})
    state, message = REFUSED[what]
    with pytest.raises(checkflow.InputError, match=message):
        raise refused(tmp_path, {"good": torch.ones(3), **state})
    assert checkpoints(tmp_path) == ["00000001-iteration-1"]
    assert not list(tmp_path.glob(".*"))
    assert loaded(tmp_path, {"epoch": 0}) == {"epoch": 1}


def test_a_planner_that_gives_bytes_alone_is_refused(tmp_path: Path) -> None:
    class Bytes(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

    assert "use a planner with lookup_object()" in str(refused(tmp_path, {"epoch": 1}, planner=Bytes()))


def test_a_tensor_that_its_plan_does_not_say_is_refused(tmp_path: Path) -> None:
    class Halves(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            found = super().resolve_data(write_item)
            assert isinstance(found, torch.Tensor)
            return found.half()

    assert "which its plan does not say" in str(refused(tmp_path, {"a": torch.ones(2)}, planner=Halves()))


def test_what_no_rank_wrote_makes_no_checkpoint(tmp_path: Path) -> None:
    class Forgetful(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return super().finish_plan(SavePlan(new_plan.items[1:], new_plan.storage_data, new_plan.planner_data))

    for state in ({"a": torch.ones(2), "b": torch.ones(2)}, {"a": 1, "b": 2}):
        assert "a: no rank wrote all of it" in str(refused(tmp_path, state, planner=Forgetful()))  # type: ignore[arg-type]
    assert not checkpoints(tmp_path) and not list(tmp_path.glob(".*"))


class Halved(DefaultSavePlanner):
    """Each matrix is planned as two."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return SavePlan([half for item in plan.items for half in _halves(item)], planner_data=plan.planner_data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor = self.state_dict[write_item.index.fqn]
        assert isinstance(tensor, torch.Tensor) and write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return tensor.narrow(0, chunk.offsets[0], chunk.sizes[0])


def _halves(item: WriteItem) -> Iterator[WriteItem]:
    from dataclasses import replace

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItemType

    assert item.tensor_data is not None
    rows, columns = item.tensor_data.size
    for first, count in ((0, rows // 2), (rows // 2, rows - rows // 2)):
        chunk = ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([count, columns]))
        yield WriteItem(
            MetadataIndex(item.index.fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=replace(item.tensor_data, chunk=chunk),
        )


def test_several_parts_of_one_tensor_in_one_rank(tmp_path: Path) -> None:
    """Under names of which none is another tensor's, or one that safetensors keeps for itself."""
    names = ("a", "a#1", "__metadata__", "a#1#1")
    state: dict[str, object] = {name: torch.rand(5, 2) for name in names}
    saved(tmp_path, state, planner=Halved())
    found = loaded(tmp_path, {name: torch.zeros(5, 2) for name in names})
    assert all(torch.equal(found[name], state[name]) for name in names)  # type: ignore[arg-type]


def test_saved_beside_the_training(tmp_path: Path) -> None:
    """What was staged is the state as it was; the process may be another one."""
    weight = torch.ones(3)
    writer = checkflow.StoreWriter(tmp_path)
    for _ in range(2):
        future = async_save({"weight": weight, "epoch": 1}, storage_writer=writer)
        weight += 1
        assert isinstance(future, Future)
        future.result()
    found = loaded(tmp_path, {"weight": torch.zeros(3), "epoch": 0})
    assert found["weight"].tolist() == [2, 2, 2] and found["epoch"] == 1  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(writer)).checkpoint_id == tmp_path


def test_training_and_state_dicts_in_one_store(tmp_path: Path) -> None:
    """One at a time; what is a state_dict no training restores, and says so."""

    def training() -> checkflow.Checkpointer:
        model = torch.nn.Linear(2, 2)
        return checkflow.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), store=tmp_path)

    with training() as checkpointer:
        checkpointer.step()
        checkpointer.step()
        checkpointer.save()
        assert isinstance(refused(tmp_path, {"epoch": 1}), checkflow.StoreBusyError)
    saved(tmp_path, {"epoch": 1})
    assert checkpoints(tmp_path)[-1].endswith("iteration-3")
    with training() as checkpointer:
        with pytest.raises(checkflow.InputError, match="iteration 3 is a state_dict that StoreWriter saved; read it"):
            checkpointer.restore()
        assert checkpointer.restore(2) == 2
    assert loaded(tmp_path, {"epoch": 0}, 3) == {"epoch": 1}


@pytest.mark.parametrize("is_anew", [False, True], ids=["the same writer", "another writer"])
def test_what_another_rank_s_failure_left_is_gone_with_the_next_save(
    is_anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's files are there, and are never named."""
    writer = checkflow.StoreWriter(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(writer, "finish", None)  # as where torch does not come to it
        with pytest.raises(CheckpointException):
            save({"a": torch.ones(2)}, storage_writer=writer)
    assert not checkpoints(tmp_path) and len(list(tmp_path.glob(".incomplete-*"))) == 1
    next_writer = checkflow.StoreWriter(tmp_path) if is_anew else writer
    save({"a": torch.ones(2)}, storage_writer=next_writer)
    assert checkpoints(tmp_path) == ["00000001-iteration-1"] and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("iteration", [-1, 1.5, True, "3", 2**60])
def test_an_iteration_is_a_number(iteration: object, tmp_path: Path) -> None:
    with pytest.raises(checkflow.InputError, match=r"iteration: is .*; give how many are completed"):
        checkflow.StoreWriter(tmp_path, iteration)  # type: ignore[arg-type]


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is no store that can be read" in str(refused(tmp_path / "file", {"epoch": 1}))


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, {"epoch": 1})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("checkflow.store.format.disk.LocalDisk.write", full)
        error = refused(tmp_path, {"epoch": 2})
    assert isinstance(error, checkflow.StoreError) and "No space left on device" in str(error)
    assert not list(tmp_path.glob(".*"))
    assert loaded(tmp_path, {"epoch": 0}) == {"epoch": 1}


def forged(store: Path, change: Mapping[str, object]) -> None:
    """Another index in the checkpoint that there is, with hashes that match."""
    from checkflow.store import alone as writing
    from checkflow.store.format.begun import NewFile

    (before,) = store.glob("0*")
    document = json.loads((before / "commit.json").read_text())
    document["state_dict"]["index"].update(change)
    data = memoryview(bytearray((before / "state.safetensors").read_bytes()))
    begun = writing.begin(store, [NewFile("state.safetensors", len(data), [data])], print)
    writing.publish(begun, 2, json.dumps(document | {"iteration": 2}).encode(), {}, print)


CHUNK = {"rank": 0, "tensor": "w", "offsets": [0], "sizes": [3]}
WRONG: list[tuple[dict[str, object], str]] = [
    ({"tensors": {"w": {"dtype": "float32", "shape": [3], "chunks": [CHUNK | {"rank": 1}]}}}, "outside of it"),
    ({"tensors": {"w": {"dtype": "float32", "shape": [3], "chunks": [CHUNK | {"offsets": [1]}]}}}, "outside of it"),
    ({"tensors": {"w": {"dtype": "float32", "shape": [3, 1], "chunks": [CHUNK]}}}, "outside of it"),
    ({"tensors": {"w": {"dtype": "int32", "shape": [3], "chunks": [CHUNK]}}}, "is not in its files as its record says"),
    ({"tensors": {"w": {"dtype": "eval", "shape": [3], "chunks": [CHUNK]}}}, "the dtype 'eval'"),
    (
        {"tensors": {"w": {"dtype": "float32", "shape": [3], "chunks": [CHUNK | {"tensor": "v"}]}}},
        "is not in its files",
    ),
    ({"values": {"epoch": 1}}, "names a rank that it does not have"),
    ({"values": {"other": 0}}, "lacks the value 'other'"),
    ({"planner": {"$eval": 1}}, "unknown tag"),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_an_index_is_believed_as_far_as_files_bear_it_out(change: dict[str, object], why: str, tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(3), "epoch": 1})
    forged(tmp_path, change)
    wanted: dict[str, object] = {"other": 0} if "other" in str(change) else {"w": torch.zeros(3), "epoch": 0}
    with pytest.raises(CheckpointException, match=why):
        loaded(tmp_path, wanted)
    shutil.rmtree(tmp_path / "00000002-iteration-2")
    assert loaded(tmp_path, {"epoch": 0}) == {"epoch": 1}
