"""JSON to values. Nothing is taken that `encode` could not have written, and nothing is allocated on its word alone."""

from __future__ import annotations

import binascii
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from operator import is_not
from typing import TypeVar

import numpy as np
import torch

from checkflow import strictjson
from checkflow.errors import FormatError
from checkflow.state.host.json_values import (
    ARRAY_DTYPES,
    LEAVES,
    MAX_DEPTH,
    NAMED_DTYPES,
    SURROGATES,
    TENSOR_DTYPES,
    Array,
    Json,
    Named,
    RefusedError,
    Stored,
    base64_of,
    check_bool,
    check_key,
    check_shape,
    is_utf8,
)
from checkflow.state.memory import laid

_SetT = TypeVar("_SetT", set[object], frozenset[object])
_CHANGING = frozenset({"$set", "$dict", "$ordered", "$counter", "$deque", "$array"})  # beside lists and JSON's objects


def decode(value: Json, path: str) -> object:
    """The value that was encoded. Raises FormatError for what `encode` could not have written."""
    return decode_noting(value, path)[0]


def decode_noting(value: Json, path: str) -> tuple[object, bool]:
    """The same, and whether a set in it iterates otherwise than what was encoded.

    Text has another hash in each process, and a set that was larger once has its members elsewhere.
    """
    made = _Whole()
    try:
        return _decode(value, MAX_DEPTH, made), made.otherwise
    except RefusedError as refused:
        raise FormatError(f"{path}: {refused}; take another checkpoint") from None


def load(data: bytes, path: str) -> Json:
    """Strict JSON text: no key twice, no NaN. Raises FormatError."""
    try:
        return strictjson.loads(data)
    except ValueError as error:
        raise FormatError(f"{path}: is not JSON ({error}); take another checkpoint") from None


class _Whole:
    """Of one value: what can be changed, in the order in which it was whole; and sets that iterate otherwise."""

    __slots__ = ("otherwise", "whole")

    def __init__(self) -> None:
        self.whole: list[object] = []
        self.otherwise = False


def _decode(value: Json, depth: int, made: _Whole) -> object:
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        raise RefusedError("a float is not as it was written")
    if not isinstance(value, (list, dict)):
        return value
    tag = next((key for key in value if key.startswith("$")), None) if isinstance(value, dict) else None
    if depth == 0 and tag not in LEAVES:
        raise RefusedError("is nested too deeply")
    if tag is None:
        found: object = (
            [_decode(item, depth - 1, made) for item in value]
            if isinstance(value, list)
            else {key: _decode(item, depth - 1, made) for key, item in value.items()}
        )
        made.whole.append(found)
        return found
    assert isinstance(value, dict)
    decoder = _DECODERS.get(tag)
    if decoder is None or len(value) != 1:
        raise RefusedError(f"has the unknown tag {tag!r:.80}")
    found = decoder(value[tag], depth - 1, made)
    if tag in _CHANGING:
        made.whole.append(found)
    return found


def _same(value: Json, made: _Whole) -> object:
    """What was met before."""
    if type(value) is not int or not 0 <= value < len(made.whole):
        raise RefusedError("names a part that was not there before")
    return made.whole[value]


def _items(value: Json, depth: int, made: _Whole) -> list[object]:
    if not isinstance(value, list):
        raise RefusedError("a container's members are no list")
    return [_decode(item, depth, made) for item in value]


def _mapping(value: Json, depth: int, made: _Whole) -> dict[object, object]:
    pairs = [_items(pair, depth, made) for pair in value] if isinstance(value, list) else [[]]
    found: dict[object, object] = {}
    for pair in pairs:
        if len(pair) != 2:
            raise RefusedError("a mapping's members are no list of pairs")
        check_key(pair[0])
        if pair[0] in found:
            raise RefusedError("a key stands twice in one mapping")
        found[pair[0]] = pair[1]
    return found


def _members(value: Json, depth: int, made: _Whole, kind: type[_SetT]) -> _SetT:
    items = _items(value, depth, made)
    for item in items:
        check_key(item)
    found = kind(items)
    if len(found) != len(items):
        raise RefusedError("a member stands twice in one set")
    made.otherwise |= any(map(is_not, found, items))
    return found


def _counter(value: Json, depth: int, made: _Whole) -> Counter[object]:
    """Counts of any kind: a class's share, or an array of NumPy's."""
    found: Counter[object] = Counter()
    for key, count in _mapping(value, depth, made).items():
        found[key] = count  # type: ignore[assignment]
    return found


def _deque(value: Json, depth: int, made: _Whole) -> deque[object]:
    if not isinstance(value, dict) or value.keys() != {"maxlen", "items"}:
        raise RefusedError("a deque has other fields than maxlen, items")
    items, most = _items(value["items"], depth, made), value["maxlen"]
    if most is not None and (type(most) is not int or not len(items) <= most <= sys.maxsize):
        raise RefusedError("a deque's maxlen is not as it was written")
    return deque(items, most)


def _text(value: Json) -> str:
    try:
        text = bytes_of(value).decode(errors=SURROGATES)
    except UnicodeDecodeError:
        text = ""
    if is_utf8(text):
        raise RefusedError("a text is not as it was written")
    return text


def _int(value: Json) -> int:
    try:
        number = int(value, 16) if isinstance(value, str) else 0
    except ValueError:
        number = 0
    if -(2**63) <= number < 2**63 or hex(number) != value:
        raise RefusedError("a large integer is not as it was written")
    return number


def _float(value: Json) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise RefusedError("a float is not as it was written")
    return float(str(value))


def bytes_of(value: Json) -> bytes:
    """Raises RefusedError unless it is canonical base64."""
    try:
        data = binascii.a2b_base64(value, strict_mode=True) if isinstance(value, str) and value.isascii() else None
    except binascii.Error:
        data = None
    if data is None or base64_of(data) != value:
        raise RefusedError("bytes are not as they were written")
    return data


def _dtype(value: Json) -> torch.dtype:
    if not isinstance(value, str) or value not in NAMED_DTYPES:
        raise RefusedError(f"{value!r:.80} is no dtype")
    return NAMED_DTYPES[value]


def _stored(value: Json) -> Stored:
    name = value["name"] if isinstance(value, dict) and set(value) == {"name", "order"} else value
    if not isinstance(name, str):
        raise RefusedError("a stored tensor has no name")
    return Stored(name, _order(value))


def _named(value: Json) -> Named:
    if not isinstance(value, str):
        raise RefusedError("a parameter has no name")
    return Named(value)


def _order(value: Json, dims: int | None = None) -> tuple[int, ...] | None:
    """Of so many dimensions, or of those that the file's tensor turns out to have."""
    if not isinstance(value, dict) or "order" not in value:
        return None
    order = value["order"]
    found = tuple(dim for dim in order if type(dim) is int) if isinstance(order, list) else ()
    usual = tuple(range(len(found) if dims is None else dims))
    if tuple(sorted(found)) != usual or found == usual or list(found) != order:
        raise RefusedError("an order of dimensions is not as it was written")
    return found


def _parts(value: Json) -> tuple[str, tuple[int, ...], bytes]:
    """dtype, shape and bytes of a tensor or array."""
    if not isinstance(value, dict) or value.keys() - {"order"} != {"dtype", "shape", "data"}:
        raise RefusedError("a tensor has other fields than dtype, shape, data")
    dtype, shape = value["dtype"], value["shape"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise RefusedError("a tensor's dtype or shape is not as it was written")
    extents = tuple(extent for extent in shape if isinstance(extent, int) and not isinstance(extent, bool))
    if len(extents) != len(shape) or any(extent < 0 for extent in extents):
        raise RefusedError("a tensor's shape is not as it was written")
    check_shape(extents)
    return dtype, extents, bytes_of(value["data"])


def tensor_of(value: Json) -> torch.Tensor:
    """The tensor, on the CPU. Raises RefusedError unless dtype, shape and bytes belong together."""
    dtype, shape, data = _parts(value)
    if dtype not in TENSOR_DTYPES or len(data) != math.prod(shape) * TENSOR_DTYPES[dtype].itemsize:
        raise RefusedError("a tensor's dtype, shape and bytes do not belong together")
    if dtype == "bool":
        check_bool(data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor, order = flat.view(TENSOR_DTYPES[dtype]).reshape(shape), _order(value, len(shape))
    return tensor if order is None else laid(tensor, order)


def _array(value: Json) -> Array:
    dtype, shape, data = _parts(value)
    if dtype not in ARRAY_DTYPES or len(data) != math.prod(shape) * ARRAY_DTYPES[dtype].itemsize:
        raise RefusedError("an array's dtype, shape and bytes do not belong together")
    if dtype == "|b1":
        check_bool(data)
    array = np.frombuffer(bytearray(data), dtype=ARRAY_DTYPES[dtype]).reshape(shape)
    order = _order(value, len(shape))
    if order is None:
        return array
    lying = np.ascontiguousarray(array.transpose(order))
    return lying.transpose(sorted(range(len(order)), key=order.__getitem__))


def _scalar(value: Json) -> object:
    array = _array(value)
    if array.shape != ():
        raise RefusedError("a scalar has a shape")
    return array[()]


_DECODERS: dict[str, Callable[[Json, int, _Whole], object]] = {
    "$tuple": lambda value, depth, made: tuple(_items(value, depth, made)),
    "$set": lambda value, depth, made: _members(value, depth, made, set),
    "$frozenset": lambda value, depth, made: _members(value, depth, made, frozenset),
    "$dict": _mapping,
    "$ordered": lambda value, depth, made: OrderedDict(_mapping(value, depth, made)),
    "$counter": _counter,
    "$deque": _deque,
    "$bytes": lambda value, *_: bytes_of(value),
    "$int": lambda value, *_: _int(value),
    "$float": lambda value, *_: _float(value),
    "$dtype": lambda value, *_: _dtype(value),
    "$text": lambda value, *_: _text(value),
    "$tensor": lambda value, *_: tensor_of(value),
    "$array": lambda value, *_: _array(value),
    "$scalar": lambda value, *_: _scalar(value),
    "$stored": lambda value, *_: _stored(value),
    "$same": lambda value, _, made: _same(value, made),
    "$parameter": lambda value, *_: _named(value),
}
