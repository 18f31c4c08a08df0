"""Each whole number of a file or a message has a bound: nobody who reads one meets more than a float holds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import checkflow
from checkflow.counts import Amount, Count, Total, Whole

PACKAGE = Path(checkflow.__file__).parent
BOUNDS = {"maximum", "exclusiveMaximum", "const", "enum"}


def formats() -> list[type[BaseModel]]:
    """Every pydantic model of the package."""
    for path in PACKAGE.rglob("*.py"):
        if "pydantic" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    return sorted(set(_below(BaseModel)), key=lambda model: model.__qualname__)


def _below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        if each.__module__.startswith("checkflow."):
            yield each
        yield from _below(each)


def _unbounded(schema: object, where: str = "") -> Iterator[str]:
    if isinstance(schema, dict):
        if schema.get("type") == "integer" and BOUNDS.isdisjoint(schema):
            yield where
        for key, value in schema.items():
            yield from _unbounded(value, f"{where}.{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from _unbounded(value, f"{where}.{number}")


def test_each_whole_number_of_a_format_has_a_bound() -> None:
    """What is free is what users keep there: a recursive value of JSON."""
    found = {
        model.__qualname__: list(_unbounded(model.model_json_schema().get("properties", {}))) for model in formats()
    }
    assert {"Schedule", "GraphDocument", "Profile", "Row", "Manifest", "Record", "DurableReport"} <= found.keys()
    assert {name: fields for name, fields in found.items() if fields} == {}


@pytest.mark.parametrize("kind", [Count, Amount, Total, Whole])
def test_a_number_of_hundreds_of_digits_is_none(kind: type[int]) -> None:
    adapter = TypeAdapter(kind)
    assert adapter.validate_json("1000000000000000000", strict=True) == 10**18
    with pytest.raises(ValidationError):
        adapter.validate_json(str(10**400), strict=True)
