"""Python values as JSON, exactly, without pickle: the forms that a record is made of.

JSON's own values stand for themselves. Everything else is an object with one key that begins with "$", its tag:

    {"$tuple": [...]}  {"$set": [...]}  {"$frozenset": [...]}  {"$bytes": base64}  {"$int": "0x..."} beyond 64 bits
    {"$float": "nan" | "inf" | "-inf"}  {"$dict" | "$ordered" | "$counter": [[key, value], ...]}
    {"$deque": {"maxlen": number | null, "items": [...]}}            which versions before it was there refuse
    {"$dtype": "float32"}  {"$tensor": {"dtype", "shape", "data"}}   base64 of the elements in logical order
    {"$array": {...}}  {"$scalar": {...}}                            the same for NumPy's arrays and scalars
    {"$stored": name | {"name", "order"}}                            a tensor that a file of the checkpoint holds
    {"$text": base64}                                                text with surrogates, as of a name that is no UTF-8
    {"$same": number}                                                a list, dict, set, deque or array met before

Such parts are numbered from 0 in the order in which they end in the text of one value; versions before `$same` was
there refuse it. Members of a set stand in the order in which it was walked.
Of what does not lie in memory in the order of its dimensions "order" has them, outermost first.
A dict whose keys are all text that JSON has, without a leading "$", is a JSON object; any other is {"$dict": ...}.
What has a form and what a form has are decided here once: nothing is saved that no restore would take.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from checkflow.dtypes import CODES, name_of
from checkflow.strictjson import Json as Json  # the form of every value

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

MAX_DEPTH = 32  # of nested containers; each takes up to three levels of JSON
MAX_TENSOR_BYTES = 2**20  # a larger tensor belongs in a file of the checkpoint

TENSOR_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*CODES, "complex128")}
NAMED_DTYPES = {name_of(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
ARRAY_DTYPES = {
    np.dtype(f"{order}{code}").str: np.dtype(f"{order}{code}")
    for code in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
    for order in "<>"
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Stands for a tensor that a file of the checkpoint holds under this name."""

    name: str
    order: tuple[int, ...] | None = None  # of its dimensions in memory, if not as usual


@dataclass(frozen=True, slots=True)
class Named:
    """Stands for a parameter, where it is the key of a dict."""

    name: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tensor for the record though it is large: its own file has no room for it."""

    tensor: torch.Tensor


SURROGATES = "surrogatepass"
LEAVES = frozenset({"$int", "$float", "$scalar", "$text"})  # which take no level of MAX_DEPTH
_MAX_ELEMENTS = 2**62
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class RefusedError(Exception):
    """Why a value has no form, or a form no value. Never leaves this package."""


def is_utf8(text: str) -> bool:
    """Whether JSON has it: it has no surrogates, which stand for the bytes of what is no UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_key(key: object) -> None:
    """Of a mapping, or a member of a set. Raises RefusedError for what is a value only."""
    if isinstance(key, tuple):
        for part in key:
            check_key(part)
    elif not (key is None or isinstance(key, (str, bytes, int, float, frozenset, np.generic, torch.dtype, Named))):
        raise RefusedError(f"a {type(key).__name__} cannot be a key")


def check_shape(shape: Sequence[int]) -> None:
    """Of a tensor or array. Raises RefusedError."""
    if len(shape) > MAX_DEPTH:
        raise RefusedError(f"a tensor has more than {MAX_DEPTH} dimensions")
    if math.prod(max(extent, 1) for extent in shape) > _MAX_ELEMENTS:
        raise RefusedError("a tensor's shape is larger than any tensor's")


def check_bool(data: bytes) -> None:
    """The bytes of booleans. Raises RefusedError."""
    if data.strip(b"\0\1"):
        raise RefusedError("a boolean is neither 0 nor 1")


def dump(value: Json) -> str:
    """JSON text in ASCII, on one line."""
    return _ENCODER.encode(value)


def base64_of(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")
