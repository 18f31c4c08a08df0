"""The codec: every value comes back as it was, and nothing else is taken."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from checkflow.errors import FormatError, InputError
from checkflow.state.host.decode import decode, load
from checkflow.state.host.encode import encode
from checkflow.state.host.json_values import MAX_DEPTH, MAX_TENSOR_BYTES, Json, Stored, dump
from checkflow.state.memory import as_bytes

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
)  # fmt: skip
TEXTS = st.text() | st.text(st.characters())  # of which the second have surrogates, as a file's name may
KEYS = TEXTS | st.integers() | st.tuples(st.integers(), st.text()) | st.booleans() | st.none() | st.binary()
TENSORS = st.builds(
    lambda dtype, values, shape: torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape(len(values))),
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    ),
    st.lists(st.integers(0, 100), max_size=6),
    st.sampled_from([lambda n: (n,), lambda n: (1, n), lambda n: (n, 1)]),
)
ARRAYS = st.builds(
    lambda dtype, values: np.array(values, dtype=dtype),
    st.sampled_from(["<u4", ">u4", "<f8", "<i8", "|b1", "<c16", "|u1"]),
    st.lists(st.integers(0, 100), max_size=5) | st.integers(0, 100),
)
NUMBERS = st.sampled_from([np.float32(0.1), np.float64(math.pi), np.int64(-3), np.uint8(7), np.bool_(True)])
VALUES = st.recursive(
    SCALARS | TENSORS | ARRAYS | NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(4, 2**40)),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.sets(st.integers() | TEXTS | st.tuples(st.integers())),
        st.frozensets(st.integers() | TEXTS),
        st.dictionaries(KEYS, st.integers() | st.floats() | inner, max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def same(left: object, right: object) -> bool:
    """Equal in type and in every bit, NaN's sign and payload apart."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, (np.ndarray, np.generic)) and isinstance(right, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float) and isinstance(right, float):
        return math.isnan(right) if math.isnan(left) else struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict) and isinstance(right, dict):
        return len(left) == len(right) and all(
            same(*keys) and same(left[keys[0]], right[keys[1]]) for keys in zip(left, right, strict=True)
        )
    if isinstance(left, deque) and isinstance(right, deque):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(VALUES)
def test_every_value_comes_back_as_it_was(value: object) -> None:
    """Through the text and back: types, order, keys and bits. A record's parser is the stricter one."""
    text = dump(encode(value, "value"))
    assert text.isascii()
    from_json(text)
    assert same(decode(load(text.encode(), "text"), "value"), value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(["dtype", "shape", "data", "maxlen", "items"]), inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["$tuple", "$set", "$dict", "$counter", "$int", "$float", "$bytes", "$tensor", "$array",
                             "$scalar", "$dtype", "$text", "$stored", "$ordered", "$frozenset", "$deque", "$pickle"]),
            inner, max_size=2)
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_the_decoder_takes_what_can_be_encoded_or_says_no(value: Json) -> None:
    """Any JSON either decodes to something that encodes again, or raises FormatError."""
    try:
        decoded = decode(value, "value")
    except FormatError:
        return
    encode(decoded, "value")


TENSOR: dict[str, Json] = {"dtype": "float32", "shape": [2], "data": "AAAAAAAAAAA="}
BAD: list[Json] = [
    {"$pickle": ""},
    {"$tuple": [], "$set": []},
    {"$tuple": [], "more": 1},
    {"$tuple": 3},
    {"$set": [1, 1]},
    {"$set": [[1]]},
    {"$set": [{"$tensor": TENSOR}]},
    {"$set": [{"$tuple": [[1]]}]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[[], 2]]},
    {"$dict": [[1]]},
    {"$dict": 3},
    {"$counter": [["a", 1], ["a", 2]]},
    {"$deque": [1]},
    {"$deque": {"items": []}},
    {"$deque": {"items": 1, "maxlen": 1}},
    {"$deque": {"items": [1, 2], "maxlen": 1}},
    {"$deque": {"items": [], "maxlen": True}},
    {"$deque": {"items": [], "maxlen": -1}},
    {"$deque": {"items": [], "maxlen": 2**63}},
    {"$text": "YQ=="},
    {"$text": "gA=="},
    {"$text": 7},
    {"$int": "0x1"},
    {"$int": "99999999999999999999"},
    {"$int": 5},
    {"$float": "1.0"},
    {"$float": "NAN"},
    {"$bytes": "YQ"},
    {"$bytes": "YR=="},
    {"$bytes": "YQ==\n"},
    {"$bytes": 7},
    {"$dtype": "float33"},
    {"$dtype": "nn"},
    {"$stored": None},
    {"$stored": {"name": "w"}},
    {"$stored": {"name": "w", "order": [0, 1]}},
    {"$stored": {"name": "w", "order": []}},
    {"$tensor": TENSOR | {"order": [1, 0]}},
    {"$tensor": TENSOR | {"shape": [1, 2], "order": [0, 1]}},
    {"$tensor": TENSOR | {"shape": [1, 2], "order": [True, 0]}},
    {"$tensor": TENSOR | {"shape": [1, 2], "order": 2}},
    {"$tensor": TENSOR | {"shape": [3]}},
    {"$tensor": TENSOR | {"shape": [-2]}},
    {"$tensor": TENSOR | {"shape": [True, 2]}},
    {"$tensor": TENSOR | {"shape": [2, 0, 2**62]}},
    {"$tensor": TENSOR | {"dtype": "object"}},
    {"$tensor": TENSOR | {"device": "cuda"}},
    {"$tensor": TENSOR | {"dtype": "bool", "shape": [1], "data": "Ag=="}},
    {"$tensor": TENSOR | {"shape": [*(1 for _ in range(33)), 2]}},
    {"$array": TENSOR | {"dtype": "|O8"}},
    {"$scalar": TENSOR | {"dtype": "<f4"}},
    float("inf"),
]


@pytest.mark.parametrize("value", BAD, ids=range(len(BAD)))
def test_what_the_encoder_cannot_have_written_is_refused(value: Json) -> None:
    """One malformed form at a time."""
    with pytest.raises(FormatError, match="value: "):
        decode(value, "value")


@pytest.mark.parametrize("text", [b"{", b"NaN", b"1e", b'{"a":1,"a":2}', b"\xff", b"[" * 100_000, b"9" * 5000])
def test_text_that_is_no_strict_json_is_refused(text: bytes) -> None:
    """Cut short, NaN, twice the same key, no text, nested without end, numbers without end."""
    with pytest.raises(FormatError, match="is not JSON"):
        load(text, "record")


@pytest.mark.parametrize("value", [1, math.nan, 2**64, np.float32(1.5), "\udc80"], ids=str)
def test_nesting_is_bounded_both_ways(value: object) -> None:
    """MAX_DEPTH containers are taken, one more is refused, and a value that contains itself is too."""
    for _ in range(MAX_DEPTH):
        value = {3: value}
    assert same(decode(load(dump(encode(value, "v")).encode(), "t"), "v"), value)
    with pytest.raises(InputError, match="nested too deeply"):
        encode([value], "v")
    with pytest.raises(FormatError, match="nested too deeply"):
        decode([encode(value, "v")], "v")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InputError, match="contains itself"):
        encode(loop, "v")


class Custom:
    """Something with no form."""


class Pair(NamedTuple):
    one: int
    other: int


REFUSED: list[tuple[object, str]] = [
    ({"lr_lambdas": [lambda epoch: epoch]}, r"^s\.lr_lambdas\[0\]: a function cannot be saved"),
    ({"a": (1, {2: Custom()})}, r"^s\.a\[1\]\[2\]: a test_resume_codec\.Custom cannot be saved"),
    ({"a": {Custom: 1}}, r"^s\.a: key <class .*>: a class cannot be saved"),
    ({"a": torch.nn.Parameter(torch.zeros(1))}, r"^s\.a: a torch\.nn\.parameter\.Parameter"),
    ({"a": torch.zeros(1, requires_grad=True)}, r"^s\.a: a tensor that requires a gradient"),
    ({"a": torch.zeros(1, device="meta")}, r"^s\.a: a tensor on meta"),
    ({"a": torch.zeros(MAX_TENSOR_BYTES + 1, dtype=torch.uint8)}, r"^s\.a: a tensor of 1048577 bytes"),
    ({"a": torch.eye(2).to_sparse()}, r"^s\.a: a tensor of torch\.float32, torch\.sparse_coo"),
    ({"a": np.array([Custom()])}, r"^s\.a: an array of dtype object"),
    ({"a": np.float64(1).astype("M8[s]")}, r"^s\.a: an array of dtype datetime64"),
    ({"a": torch.Size([1])}, r"^s\.a: a torch\.Size"),
    ({"a": {1, Custom}}, r"^s\.a: member <class"),
    ({"a": iter([])}, r"^s\.a: a list_iterator"),
    ({"a": [Pair(1, 2)]}, r"^s\.a\[0\]: a test_resume_codec\.Pair cannot be saved; keep a plain tuple in its place"),
    ({"a": defaultdict(int)}, r"^s\.a: a collections\.defaultdict cannot be saved; keep a plain dict in its place"),
    ({"a": {torch.zeros(1): 1}}, r"^s\.a: a Tensor cannot be a key"),
    ({"a": {1: {(2, torch.zeros(1))}}}, r"^s\.a\[1\]: a Tensor cannot be a key"),
    ({"a": torch.zeros((1,) * 33)}, r"^s\.a: a tensor has more than 32 dimensions"),
    ({"a": np.zeros((1,) * 33)}, r"^s\.a: a tensor has more than 32 dimensions"),
    ({"a": torch.empty(0).as_strided((0, 2**40, 2**40), (0, 0, 0))}, r"^s\.a: a tensor's shape is larger"),
    ({"a": torch.tensor([2], dtype=torch.uint8).view(torch.bool)}, r"^s\.a: a boolean is neither 0 nor 1"),
    ({"a": np.array([2], dtype="u1").view("?")}, r"^s\.a: a boolean is neither 0 nor 1"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_saved_is_named_with_its_path(value: object, message: str) -> None:
    """The message begins with the path that a user would write."""
    with pytest.raises(InputError, match=message):
        encode(value, "s")


STRIDED = {
    "a column": torch.arange(12.0).reshape(4, 3)[:, 0],
    "one column of two dimensions": torch.arange(12.0).reshape(4, 3)[:, :1],
    "one number at many places": torch.tensor(0.5).expand(5),
    "one element of a column": torch.arange(8.0)[::8],
    "nothing of a column": torch.zeros(0)[::2],
    "backwards": torch.arange(6.0).reshape(2, 3).t(),
    "an imaginary part": torch.tensor([1 + 2j, 3 + 4j]).imag,
}


@pytest.mark.parametrize("kind", STRIDED)
def test_a_tensor_may_lie_as_it_likes(kind: str) -> None:
    value = STRIDED[kind]
    found = decode(encode(value, "v"), "v")
    assert isinstance(found, torch.Tensor) and torch.equal(found, value) and found.shape == value.shape
    data = as_bytes(value)
    assert data.numpy().tobytes() == value.clone(memory_format=torch.contiguous_format).numpy().tobytes()
    assert not value.is_contiguous() or data.data_ptr() == value.data_ptr()


def test_a_stored_tensor_is_a_name() -> None:
    """A tensor that a file holds is written as its name there."""
    for stored in (Stored("w.exp_avg"), Stored("w.exp_avg", (1, 0, 2))):
        assert decode(encode([stored], "v"), "v") == [stored]


LYING = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    np.asfortranarray(np.arange(6, dtype="<u2").reshape(2, 3)),
    np.arange(24, dtype=">f8").reshape(2, 3, 4).transpose(1, 2, 0),
]


@pytest.mark.parametrize("value", LYING, ids=range(len(LYING)))
def test_what_lies_otherwise_in_memory_does_so_again(value: torch.Tensor | np.ndarray[Any, Any]) -> None:
    """What is computed of it may depend on that in its last bits."""
    found = decode(load(dump(encode(value, "value")).encode(), "text"), "value")
    assert same(found, value)
    if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
        assert found.stride() == value.stride()
    else:
        assert isinstance(found, np.ndarray) and isinstance(value, np.ndarray)
        assert found.strides == value.strides and found.flags.writeable


class _Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [{_Silent()}, {_Silent(): 1}, [_Silent()]])
def test_a_value_whose_repr_raises_is_refused_by_its_type(value: object) -> None:
    with pytest.raises(InputError, match="_Silent"):
        encode(value, "metadata")
