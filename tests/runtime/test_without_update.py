"""What iterations without an update are told of: gradients that are added up across them, and another optimizer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import checkflow
from checkflow.runtime.without_update import STILL

OUTSIDE = "was written after step() and before its update"


@pytest.mark.parametrize(
    ("each", "skipped", "in_place", "told"),
    [
        pytest.param("batch", (), False, 1, id="for each micro-batch"),
        pytest.param("update", (), False, 0, id="for each update"),
        pytest.param("update", (), True, 0, id="for each update, zeroed in place"),
        pytest.param("update", (2, 3), False, 0, id="some are skipped"),
        pytest.param("update", (0, 1, 5), False, 0, id="the first is skipped"),
        pytest.param("update", (2, 3), True, 1, id="some are skipped, and zeroed in place: told in vain"),
    ],
)
@pytest.mark.parametrize("zeroed", ["before", "after"])
def test_only_what_is_added_up_across_it_is_told_of(
    tmp_path: Path, each: str, skipped: tuple[int, ...], in_place: bool, told: int, zeroed: str
) -> None:
    """Three micro-batches for an update, dropped before it or after."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    said: list[str] = []
    with checkflow.attach(model, optimizer, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for number in range(8):
            if zeroed == "before":
                optimizer.zero_grad(set_to_none=not in_place)
            for part in range(3):
                torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
                if each == "batch" and part < 2:
                    ckpt.step()
            if number not in skipped:
                optimizer.step()
            if zeroed == "after":
                optimizer.zero_grad(set_to_none=not in_place)
            ckpt.step()
    lines = [line for line in said if "a resume goes on without them" in line]
    assert len(lines) == told and all("model/0.weight: its gradient was written to" in line for line in lines), said


@pytest.mark.parametrize("attached", [True, False])
def test_another_optimizer_than_the_attached_one_is_told_of(tmp_path: Path, attached: bool) -> None:
    """Put in its place in mid-run: its state would be in no checkpoint."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    first, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    said: list[str] = []
    with checkflow.attach(model, first, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for number in range(12):
            torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
            optimizer = first if attached or number < 4 else other
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    assert not [line for line in said if OUTSIDE in line], said
    lines = [line for line in said if "where another one does, its state is in no checkpoint: attach that one" in line]
    assert len(lines) == (not attached) and all("model/0.weight: is written though" in line for line in lines), said


@pytest.mark.parametrize("kind", ["copy", "attached", "late", "accumulated", "scaled down", "rests"])
def test_where_nothing_that_is_attached_is_trained_it_is_told(tmp_path: Path, kind: str) -> None:
    """A copy of it may be. Told once, and not where updates begin in time or were made before, nor where gradients are
    added up."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    trained = copy.deepcopy(model) if kind == "copy" else model
    own = torch.optim.AdamW(trained.parameters()) if kind == "copy" else optimizer
    begins = {"late": STILL - 2, "accumulated": STILL + 9, "scaled down": STILL - 2}.get(kind, 0)
    said: list[str] = []
    with checkflow.attach(model, optimizer, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for number in range(STILL + 6):
            if kind == "rests" and number > 2:
                ckpt.step()
                continue
            if number >= begins or kind != "late":
                torch.autograd.backward(trained(torch.randn(2, 4)).square().mean())
            if number >= begins:
                own.step()
            if number >= begins or kind == "scaled down":
                own.zero_grad()
            ckpt.step()
    lines = [line for line in said if "nothing that is attached had an update" in line]
    assert len(lines) == (kind == "copy"), said
    assert all(f"{STILL} iterations have ended" in line for line in lines)


class _Ensemble:
    def __init__(self) -> None:
        self.weights = [torch.zeros(3)]

    def state_dict(self) -> dict[str, object]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


@pytest.mark.parametrize("kind", ["replaced", "in place", "tensor", "module", "object", "rests", "counts"])
def test_where_only_what_is_listed_beside_it_changes_nothing_is_told(tmp_path: Path, kind: str) -> None:
    """As where torch.func trains an ensemble of tensors; it is told where these rest, and only a number changes."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    box: dict[object, object] = {"weights": {"0.weight": torch.zeros(3)}, "counted": 0}
    tensor, module, ensemble = torch.zeros(3), torch.nn.Linear(2, 2), _Ensemble()
    extra = {"box": box, "tensor": tensor, "module": module, "ensemble": ensemble}
    said: list[str] = []
    with checkflow.attach(
        model, optimizer, store=tmp_path, extra=extra, notify=said.append, tell=lambda _: None
    ) as ckpt:
        for number in range(STILL + 6):
            weights = box["weights"]
            assert isinstance(weights, dict)
            with torch.no_grad():
                if kind == "replaced":
                    weights["0.weight"] = weights["0.weight"] - 1.0
                elif kind == "in place":
                    weights["0.weight"].sub_(1.0)
                elif kind == "tensor":
                    tensor.sub_(1.0)
                elif kind == "module":
                    module.weight.sub_(1.0)
                elif kind == "object":
                    ensemble.weights[0] = ensemble.weights[0] - 1.0
            box["counted"] = number if kind == "counts" else 0
            ckpt.step()
    lines = [line for line in said if "nothing that is attached had an update" in line]
    assert len(lines) == (kind in ("rests", "counts")), said


def test_the_update_of_any_attached_optimizer_is_one(tmp_path: Path) -> None:
    """Two in turns, of the same parameters: nothing is written outside of an update, and nothing waited for."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)]
    said: list[str] = []
    with checkflow.attach(model, optimizers, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for number in range(12):
            torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
            optimizers[number % 2].step()
            model.zero_grad()
            ckpt.step()
    assert not [line for line in said if OUTSIDE in line], said


def test_a_write_in_an_iteration_without_an_update_is_told_at_the_next(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    told: list[int] = []

    def notify(line: str) -> None:
        told.extend([number] * (OUTSIDE in line))

    with checkflow.attach(model, optimizer, store=tmp_path, notify=notify, tell=lambda _: None) as ckpt:
        for number in range(8):
            torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
            if number == 4:
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)
            else:
                optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    assert told == [5]
