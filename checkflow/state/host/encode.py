"""Values to JSON. What has no form is refused by its path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

import numpy as np
import torch

from checkflow.dtypes import name_of
from checkflow.errors import InputError, shown
from checkflow.extra import is_random
from checkflow.state.host.json_values import (
    ARRAY_DTYPES,
    MAX_DEPTH,
    MAX_TENSOR_BYTES,
    SURROGATES,
    TENSOR_DTYPES,
    Array,
    Json,
    Named,
    Recorded,
    RefusedError,
    Stored,
    base64_of,
    check_bool,
    check_key,
    check_shape,
    is_utf8,
)
from checkflow.state.memory import as_bytes, unusual_order

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_CHANGING = frozenset({list, dict, set, OrderedDict, Counter, deque, np.ndarray})  # of which it matters which one it is
_OPEN = -1  # the number of what is being encoded
_LOOP = "contains itself; keep what it contains without it"


def encode(value: object, path: str) -> Json:
    """The value as JSON. Raises InputError that names the first part that cannot be saved, and why."""
    try:
        return _encode(value, MAX_DEPTH, _Met())
    except RefusedError as refused:  # paths are found only now: keeping them on the way costs more than the encoding
        raise InputError(_locate(value, path, refused, ())) from None


class _Met:
    """What can be changed and was met in one value: where it is met again, it is named by its number.

    `numbers`: by id, in the order in which they were whole; _OPEN of what is not yet. `whole`: keeps them, so that an
    id stays its object's.
    """

    __slots__ = ("numbers", "whole")

    def __init__(self, around: Iterable[object] = ()) -> None:
        self.numbers = {id(value): _OPEN for value in around}
        self.whole: list[object] = []


def _encode(value: object, depth: int, met: _Met) -> Json:
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return value if is_utf8(value) else {"$text": base64_of(value.encode(errors=SURROGATES))}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        if isinstance(value, np.generic):
            return {"$scalar": _array_parts(np.asarray(value))}
        raise RefusedError(_reason(value))
    if depth == 0:
        raise RefusedError("is nested too deeply; flatten it")
    if type(value) not in _CHANGING:
        return encoder(value, depth - 1, met)
    number = met.numbers.get(id(value))
    if number == _OPEN:
        raise RefusedError(_LOOP)
    if number is not None:
        return {"$same": number}
    met.numbers[id(value)] = _OPEN
    found = encoder(value, depth - 1, met)
    met.numbers[id(value)] = len(met.whole)
    met.whole.append(value)
    return found


def _reason(value: object) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if callable(value) and hasattr(value, "__name__"):
        kind = "class" if isinstance(value, type) else "function"
        return f"a {kind} cannot be saved; keep it out of the state"
    if is_random(value):
        return f"a {name} cannot be saved here; list it by itself, extra={{'rng': rng}}"
    if isinstance(value, torch.Tensor):
        return f"a {name} cannot be saved here; keep a plain detached tensor"
    if (base := next((base for base in _CONTAINERS if isinstance(value, base)), None)) is not None:
        return f"a {name} cannot be saved; keep a plain {base.__name__} in its place"
    return f"a {name} cannot be saved; keep numbers, text, small tensors, arrays and plain containers of them"


def _list(value: Iterable[object], depth: int, met: _Met) -> list[Json]:
    return [_encode(item, depth, met) for item in value]


def _dict(value: dict[object, object], depth: int, met: _Met) -> Json:
    if all(type(key) is str and not key.startswith("$") and is_utf8(key) for key in value):
        return {str(key): _encode(item, depth, met) for key, item in value.items()}
    return {"$dict": _pairs(value, depth, met)}


def _pairs(value: dict[object, object], depth: int, met: _Met) -> list[Json]:
    for key in value:
        check_key(key)
    return [[_encode(key, depth, met), _encode(item, depth, met)] for key, item in value.items()]


def _members(value: Iterable[object], depth: int, met: _Met) -> list[Json]:
    """In the order in which the loop meets them, which a restore compares with."""
    for member in value:
        check_key(member)
    return _list(value, depth, met)


def tensor_parts(value: torch.Tensor, max_bytes: int | None = MAX_TENSOR_BYTES) -> Json:
    """A tensor's dtype, shape and bytes. Raises RefusedError for what has none here."""
    name = name_of(value.dtype)
    if name not in TENSOR_DTYPES or value.layout != torch.strided:
        raise RefusedError(f"a tensor of {value.dtype}, {value.layout}, cannot be saved here; keep a dense one")
    if value.device.type != "cpu":
        raise RefusedError(f"a tensor on {value.device} cannot be saved here: reading it stalls; keep it on the CPU")
    if value.requires_grad:
        raise RefusedError("a tensor that requires a gradient cannot be saved here; detach it")
    size_bytes = value.numel() * value.element_size()
    if max_bytes is not None and size_bytes > max_bytes:
        raise RefusedError(f"a tensor of {size_bytes} bytes cannot be saved here; keep at most {max_bytes}")
    check_shape(value.shape)
    data = as_bytes(value.resolve_conj().resolve_neg()).numpy().tobytes()
    if value.dtype == torch.bool:
        check_bool(data)
    parts: dict[str, Json] = {"dtype": name, "shape": list(value.shape), "data": base64_of(data)}
    return parts | _order(unusual_order(value))


def _order(order: tuple[int, ...] | None) -> dict[str, Json]:
    return {} if order is None else {"order": list(order)}


def _array_parts(value: Array) -> Json:
    if value.dtype.str not in ARRAY_DTYPES:
        raise RefusedError(f"an array of dtype {value.dtype} cannot be saved; keep numbers of at most 64 bits")
    if value.nbytes > MAX_TENSOR_BYTES:
        raise RefusedError(f"an array of {value.nbytes} bytes cannot be saved; keep at most {MAX_TENSOR_BYTES}")
    check_shape(value.shape)
    data = value.tobytes()
    if value.dtype == np.bool_:
        check_bool(data)
    parts: dict[str, Json] = {"dtype": value.dtype.str, "shape": list(value.shape), "data": base64_of(data)}
    return parts | _order(_array_order(value))


def _array_order(value: Array) -> tuple[int, ...] | None:
    """As unusual_order of a tensor, whose dtypes are fewer."""
    if value.flags.c_contiguous:
        return None
    order = tuple(sorted(range(value.ndim), key=value.strides.__getitem__, reverse=True))
    return order if value.transpose(order).flags.c_contiguous else None


_ENCODERS: dict[type, Callable[..., Json]] = {
    list: _list,
    dict: _dict,
    tuple: lambda value, depth, met: {"$tuple": _list(value, depth, met)},
    set: lambda value, depth, met: {"$set": _members(value, depth, met)},
    frozenset: lambda value, depth, met: {"$frozenset": _members(value, depth, met)},
    OrderedDict: lambda value, depth, met: {"$ordered": _pairs(value, depth, met)},
    Counter: lambda value, depth, met: {"$counter": _pairs(value, depth, met)},
    deque: lambda value, depth, met: {"$deque": {"maxlen": value.maxlen, "items": _list(value, depth, met)}},
    bytes: lambda value, *_: {"$bytes": base64_of(value)},
    torch.dtype: lambda value, *_: {"$dtype": name_of(value)},
    torch.Tensor: lambda value, *_: {"$tensor": tensor_parts(value)},
    np.ndarray: lambda value, *_: {"$array": _array_parts(value)},
    Named: lambda value, *_: {"$parameter": value.name},
    Recorded: lambda value, *_: {"$tensor": tensor_parts(value.tensor, None)},
    Stored: lambda value, *_: {
        "$stored": value.name if value.order is None else {"name": value.name} | _order(value.order)
    },
}


def _locate(value: object, path: str, refused: RefusedError, around: tuple[object, ...]) -> str:
    """Path and reason of the first part that is refused."""
    within = (*around, value)
    for where, part in _parts(value, path) if len(around) < MAX_DEPTH else ():
        try:
            _encode(part, MAX_DEPTH - len(within), _Met(within))
        except RefusedError as inner:
            if any(part is each for each in within):
                return f"{where}: {inner}"
            return _locate(part, where, inner, within)
    return f"{path}: {refused}"


def _parts(value: object, path: str) -> list[tuple[str, object]]:
    if isinstance(value, (list, tuple, deque)) and type(value) in (list, tuple, deque):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if type(value) is set or type(value) is frozenset:
        return [(f"{path}: member {shown(item, 80)}", item) for item in value]
    found: list[tuple[str, object]] = []
    if type(value) in (dict, OrderedDict, Counter) and isinstance(value, dict):
        for key, item in value.items():
            below = f"{path}.{key}" if type(key) is str else f"{path}[{shown(key, 80)}]"
            found += [(f"{path}: key {shown(key, 80)}", key), (below, item)]
    return found
