"""Names as earlier versions wrote them: with wrappers that leave themselves out of state_dict, `in_state_dict`.

What a checkpoint says of its state has the names of now once it was read; what a user gave keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from checkflow.state.host.json_values import Json
from checkflow.state.names import in_state_dict
from checkflow.torch_internals import CHECKPOINTED

_OF_STATE = ("models", "optimizers", "replay", "shards", "elsewhere", "frozen", "gradients", "modes")


def has_earlier_names(record: bytes) -> bool:
    """Whether a record's text may have one."""
    return CHECKPOINTED.encode() in record


def record_of_now(document: Mapping[str, Json]) -> dict[str, Json]:
    """The record under the names of now."""
    return {key: _renamed(value) if key in _OF_STATE else value for key, value in document.items()}


def _renamed(value: Json) -> Json:
    if isinstance(value, str):
        return in_state_dict(value)
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {in_state_dict(key): _renamed_in(key, item) for key, item in value.items()}


def _renamed_in(key: str, value: Json) -> Json:
    """Of what the user's code gave: its place, and the parameters that it refers to."""
    if key == "extra" and isinstance(value, dict):
        return {in_state_dict(path): state for path, state in value.items()}
    return _with_parameters(value) if key in ("values", "host") else _renamed(value)


def _with_parameters(value: Json) -> Json:
    if isinstance(value, list):
        return [_with_parameters(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _renamed(item) if key == "$parameter" else _with_parameters(item) for key, item in value.items()}
