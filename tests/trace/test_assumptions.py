"""What a trace on the CPU assumes of an optimizer is what torch chooses on CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import optim
from trainings import classify, mlp

from checkflow import Training
from checkflow.trace import trace_training

# Without those that are refused: LBFGS needs a closure, and SparseAdam sparse gradients.
LEFT_OUT = (optim.Optimizer, optim.LBFGS, optim.SparseAdam)
KINDS = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind not in LEFT_OUT
]


def trained_by(kind: type[optim.Optimizer]) -> Callable[[], Training]:
    def factory() -> Training:
        model = mlp()
        taken = [p for p in model.parameters() if p.ndim == 2] if kind is optim.Muon else list(model.parameters())
        return classify(model, kind(taken))  # type: ignore[call-arg]

    return factory


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_optimizer_of_torch_runs_as_it_would_on_cuda(
    kind: type[optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told that a CPU has foreach kernels by default, torch itself chooses as it does on CUDA."""
    assumed = trace_training(trained_by(kind), model="m", real=True)
    optimizer = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    chosen = trace_training(trained_by(kind), model="m", real=True, cuda_defaults=False)
    assert [op.name for op in assumed.graph.ops] == [op.name for op in chosen.graph.ops]
    assert any(kind.__name__ in note for note in assumed.notes) == any("_foreach" in op.name for op in chosen.graph.ops)


def test_what_an_optimizer_of_ones_own_chooses_is_not_assumed() -> None:
    class Own(optim.Optimizer):
        def __init__(self, parameters: object) -> None:
            super().__init__(parameters, {"foreach": None})  # type: ignore[arg-type]

        def step(self) -> None:  # type: ignore[override]
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= parameter.grad * (2 if self.param_groups[0]["foreach"] else 1)

    class Derived(optim.AdamW):
        pass

    def factory(kind: type[optim.Optimizer]) -> Callable[[], Training]:
        def made() -> Training:
            model = mlp()
            return classify(model, kind(model.parameters()))  # type: ignore[call-arg]

        return made

    assert trace_training(factory(Own), model="m").notes[1:] == (
        "Own: foreach is unset and nothing assumed of it; set it to what it is on CUDA",
    )
    assert trace_training(factory(Derived), model="m").notes[1:] == (
        "Derived: foreach=True assumed, the default on CUDA",
    )
