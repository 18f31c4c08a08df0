"""JSON as every file of ours is read: UTF-8, no key twice in an object, no NaN, no Infinity and no 1e999."""

from __future__ import annotations

import json
import math
from typing import TypeAlias

from pydantic import JsonValue

Json: TypeAlias = JsonValue


def loads(text: str | bytes) -> Json:
    """The value. Raises ValueError that says in one line, of at most 80 characters, what is wrong."""
    try:
        decoded = text if isinstance(text, str) else text.decode()
        value: Json = json.loads(decoded, object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error).splitlines()[0][:80]) from None
    return value


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _float(text: str) -> float:
    found = float(text)
    if math.isinf(found):  # which no JSON could say again
        raise ValueError(f"{text[:20]} is larger than any number here")
    return found


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
