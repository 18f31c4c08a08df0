"""A slot's bytes are plain safetensors files, whatever the tensors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save_model

from checkflow.dtypes import ITEM_BYTES
from checkflow.errors import CorruptStoreError, InputError
from checkflow.store.format.layout import ALIGN_BYTES, FileSpec, Layout, TensorSpec
from checkflow.store.format.pieces import pieces
from checkflow.store.format.tensor_file import contents_of

NAMES = st.text(min_size=1, max_size=12).filter(
    lambda name: name not in ("__metadata__", "format") and not any("\ud800" <= letter <= "\udfff" for letter in name)
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensor_specs(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    dtypes = st.sampled_from([dtype for dtype in ITEM_BYTES if dtype != "F8_E8M0"])
    return tuple(TensorSpec(name, draw(dtypes), draw(SHAPES)) for name in names)


def slot_of(layout: Layout) -> memoryview:
    slot = memoryview(bytearray(layout.size_bytes))
    for file in layout.files:
        slot[file.offset_bytes : file.offset_bytes + len(file.header)] = file.header
    return slot


def written(layout: Layout, slot: memoryview, index: int = 0) -> bytes:
    """The file that the saver would write."""
    file = layout.files[index]
    return b"".join(bytes(piece) for piece in pieces(slot, file))[: file.size_bytes]


@given(tensor_specs())
def test_safetensors_reads_every_file(specs: tuple[TensorSpec, ...]) -> None:
    """Header aligned, no hole, no trailing byte: safetensors refuses anything else, and finds every tensor."""
    layout = Layout.of((FileSpec("model.safetensors", specs),))
    file = layout.files[0]
    tensors = load(written(layout, slot_of(layout)))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {s.name: s.shape for s in specs}
    assert len(file.header) % ALIGN_BYTES == 0
    assert file.size_bytes == len(file.header) + sum(spec.size_bytes for spec in specs)
    for tensor in file.tensors:
        assert tensor.offset_bytes % ITEM_BYTES[tensor.spec.dtype] == 0


@given(tensor_specs())
def test_our_own_reading_agrees(specs: tuple[TensorSpec, ...]) -> None:
    """contents_of gives each tensor the bytes at its place."""
    layout = Layout.of((FileSpec("model.safetensors", specs),))
    slot = slot_of(layout)
    for number, tensor in enumerate(layout.files[0].tensors):
        slot[tensor.offset_bytes : tensor.end_bytes] = bytes([number + 1]) * tensor.spec.size_bytes
    contents = contents_of("model.safetensors", memoryview(written(layout, slot)))
    for tensor in layout.files[0].tensors:
        assert contents.tensors[tensor.spec.name].data == slot[tensor.offset_bytes : tensor.end_bytes]


def test_the_header_byte_for_byte() -> None:
    """The bytes that docs/store.md shows."""
    layout = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "F32", (2, 3)),), (("v", "w"),)),))
    text = b'{"__metadata__":{"format":"pt","v":"w"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    assert layout.files[0].header == (4088).to_bytes(8, "little") + text.ljust(4088)
    assert layout.files[0].size_bytes == 4096 + 24
    assert layout.size_bytes == 8192


def test_files_begin_at_pages() -> None:
    """The second file begins at the next multiple of 4096."""
    spec = (TensorSpec("w", "U8", (1,)),)
    layout = Layout.of((FileSpec("model.0.safetensors", spec), FileSpec("model.1.safetensors", spec)))
    assert [file.offset_bytes for file in layout.files] == [0, 8192]
    assert layout.find("model.1.safetensors", "w").offset_bytes == 8192 + 4096


def test_tied_names_are_stored_as_safetensors_stores_them(tmp_path: object) -> None:
    """The metadata names the other names of a tied tensor, as save_model does."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(2, 2, bias=False)
            self.b = torch.nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

    path = f"{tmp_path}/reference.safetensors"
    save_model(Tied(), path)
    with safe_open(path, "pt") as reference:
        metadata = reference.metadata()
        names = list(reference.keys())
    (kept,) = names
    (other,) = {"a.weight", "b.weight"} - {kept}
    assert metadata[other] == kept
    layout = Layout.of((FileSpec("model.safetensors", (TensorSpec(kept, "F32", (2, 2)),), ((other, kept),)),))
    contents = contents_of("model.safetensors", memoryview(written(layout, slot_of(layout))))
    assert contents.aliases == {other: kept}


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3), (2, 0, 3, 1)])
def test_other_memory_orders_are_written_in_logical_order(order: tuple[int, ...]) -> None:
    """A tensor that lies in memory in another order (channels_last) is plain in the file."""
    shape = (4, 3, 5, 6)
    logical = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    specs = (TensorSpec("a", "F32", (3,)), TensorSpec("c", "F32", shape, order), TensorSpec("d", "U8", (5,)))
    layout = Layout.of((FileSpec("model.safetensors", specs),))
    slot = slot_of(layout)
    place = layout.find("model.safetensors", "c")
    slot[place.offset_bytes : place.end_bytes] = memoryview(logical.transpose(order).tobytes())
    before = bytes(slot)
    tensors = load(written(layout, slot))
    assert torch.equal(tensors["c"], torch.from_numpy(logical))
    assert bytes(slot) == before  # the slot stays as staged, for a saver that is started again


def test_a_reordered_tensor_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that a reordered tensor only partly covers are put together right."""
    monkeypatch.setattr("checkflow.store.format.pieces.WRITE_BYTES", 4096)
    logical = np.arange(70 * 50, dtype=np.int32).reshape(70, 50)
    specs = (TensorSpec("a", "I32", (700,)), TensorSpec("t", "I32", (70, 50), (1, 0)), TensorSpec("z", "I32", (99,)))
    layout = Layout.of((FileSpec("model.safetensors", specs),))
    slot = slot_of(layout)
    for name, values in (("a", np.full(700, 7, np.int32)), ("t", logical.T), ("z", np.full(99, 9, np.int32))):
        place = layout.find("model.safetensors", name)
        slot[place.offset_bytes : place.end_bytes] = memoryview(values.tobytes())
    tensors = load(written(layout, slot))
    assert torch.equal(tensors["t"], torch.from_numpy(logical))
    assert (tensors["a"] == 7).all() and (tensors["z"] == 9).all()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((FileSpec("../model.safetensors", ()),), "file name"),
        ((FileSpec("model.bin", ()),), "end in .safetensors"),
        ((FileSpec("m.safetensors", ()), FileSpec("M.safetensors", ())), "given twice"),
        ((FileSpec("m.safetensors", (TensorSpec("a", "U8", ()), TensorSpec("a", "U8", ()))),), "'a' is given twice"),
        ((FileSpec("m.safetensors", (TensorSpec("__metadata__", "U8", ()),)),), "reserves"),
        ((FileSpec("m.safetensors", (TensorSpec("a", "Q4", ()),)),), "no dtype 'Q4'"),
        ((FileSpec("m.safetensors", (TensorSpec("a", "U8", (-1,)),)),), "negative"),
        ((FileSpec("m.safetensors", (TensorSpec("a", "U8", (2, 2), (0, 0)),)),), "no order"),
        ((FileSpec("m.safetensors", (), (("b", "a"),)),), "tied to 'a'"),
    ],
)
def test_what_no_file_can_hold_is_refused_by_name(files: tuple[FileSpec, ...], says: str) -> None:
    """One line that names the file and the tensor."""
    with pytest.raises(InputError, match=says):
        Layout.of(files)


def header(entries: object, body: bytes = b"") -> memoryview:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return memoryview(len(text).to_bytes(8, "little") + text + body)


def entry(dtype: str, shape: list[int], low: int, high: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [low, high]}


@pytest.mark.parametrize(
    "file",
    [
        memoryview(b""),
        memoryview(b"\xff" * 8),
        memoryview((2**40).to_bytes(8, "little") + b"{}"),
        header(b"[" * 100_000),
        header(b'{"a":1,"a":2}'),
        header([]),
        header({"a": entry("F32", [1], 0, 4)}),
        header({"a": entry("F32", [1], 0, 4)}, b"12345"),
        header({"a": entry("F32", [1], -4, 0)}, b"1234"),
        header({"a": entry("F32", [10**18, 10**18], 0, 4)}, b"1234"),
        header({"a": entry("F32", [-1, -1], 0, 4)}, b"1234"),
        header({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, b"1234"),
        header({"a": entry("F32", [1], 4, 8)}, b"12345678"),
        header({"a": entry("X9", [1], 0, 4)}, b"1234"),
        header({"a": entry("F32", [1] * 100, 0, 4)}, b"1234"),
        header({"a": entry("F32", [True], 0, 4)}, b"1234"),
        header({"__metadata__": {"a": 1}}),
        header({"__metadata__": 3}),
    ],
)
def test_a_hostile_header_is_refused(file: memoryview) -> None:
    """Nothing is believed that the file's own size does not bear out."""
    with pytest.raises(CorruptStoreError, match="model"):
        contents_of("model.safetensors", file)
