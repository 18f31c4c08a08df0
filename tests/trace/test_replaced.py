"""What a trace puts in torch's place is gone afterwards, however the trace ends."""

from __future__ import annotations

import types

import pytest
import torch

from checkflow.trace.replaced import replaced


class Base:
    def said(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "static"


class Derived(Base):
    pass


def test_what_is_inherited_is_inherited_again() -> None:
    with replaced(Derived, "said", lambda _: "other"):
        assert Derived().said() == "other"
        assert Base().said() == "base"
    assert Derived().said() == "base"
    assert "said" not in vars(Derived)


def test_a_descriptor_is_put_back_as_it_was() -> None:
    before = vars(Base)["static"]
    with replaced(Base, "static", lambda: "other"):
        assert Base.static() == "other"
    assert vars(Base)["static"] is before


def test_of_a_module_and_after_an_error() -> None:
    module = types.ModuleType("some")
    vars(module)["name"] = 1
    with pytest.raises(ZeroDivisionError), replaced(module, "name", 2):
        assert vars(module)["name"] == 2
        raise ZeroDivisionError
    assert vars(module)["name"] == 1


def test_within_each_other_and_of_torch() -> None:
    before = torch.Tensor.numpy
    with replaced(torch.Tensor, "numpy", 1), replaced(torch.Tensor, "numpy", 2):
        assert vars(torch.Tensor)["numpy"] == 2
    assert torch.Tensor.numpy is before
    assert "numpy" not in vars(torch.Tensor)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="nothing"), replaced(Base, "nothing", 1):
        raise AssertionError
