"""Where hooks fire: positions, order, occurrences, and that none is left behind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn, optim
from trainings import FEATURES, batch, mlp

from checkflow import Training
from checkflow.graph import Anchor, AnchorKind, Graph
from checkflow.trace import trace_training


def graph_of(name: str) -> Graph:
    return trace_training(FEATURES[name], model="m", cuda_defaults=False).graph


def test_a_plain_iteration() -> None:
    """One anchor for each position that has one, in order; of those at one position the preferred stays."""

    def factory() -> Training:
        model, x = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)), torch.randn(2, 4)
        sgd = optim.SGD(model.parameters(), 0.1, foreach=False)

        def iteration() -> None:
            torch.autograd.backward(model(x).sum())
            sgd.step()
            sgd.zero_grad()

        return Training(model, sgd, iteration)

    graph = trace_training(factory, model="m", cuda_defaults=False).graph
    names = [op.name.removeprefix("aten.") for op in graph.ops]
    forward, backward = ["mm.default"] * 2 + ["sum.default"], ["ones_like.default"] + ["mm.default"] * 3
    assert names == [*forward, *backward, "add_.Tensor", "add_.Tensor"]
    kinds = AnchorKind
    assert graph.anchors == (
        Anchor(kinds.FORWARD_PRE, "model", 1, 0),  # not model/0: the outermost
        Anchor(kinds.FORWARD_PRE, "model/1", 1, 1),  # not the end of model/0
        Anchor(kinds.FORWARD, "model", 1, 2),  # not model/1
        Anchor(kinds.GRADIENT, "model/1.weight", 1, 6),
        Anchor(kinds.OPTIMIZER_PRE, "optimizer", 1, 7),  # not the gradient of model/0.weight
        Anchor(kinds.ITERATION_END, "", 1, 9),  # not the optimizer's end
    )


def test_occurrences_count_every_firing() -> None:
    """With three passes in one iteration a module fires three times; what another anchor hides counts too."""
    anchors = graph_of("accumulation").anchors
    assert [a.occurrence for a in anchors if (a.kind, a.subject) == (AnchorKind.FORWARD_PRE, "model/4")] == [1, 2, 3]
    assert [a.occurrence for a in anchors if (a.kind, a.subject) == (AnchorKind.FORWARD, "model")] == [1, 2, 3]


def test_several_models_and_optimizers_are_told_apart() -> None:
    """Subjects are numbered where there is more than one."""
    subjects = {anchor.subject for anchor in graph_of("gan").anchors}
    assert {"model.0", "optimizer.0", "optimizer.1"} <= subjects
    assert not subjects & {"model", "optimizer"}


def test_a_recomputed_module_fires_again_in_backward() -> None:
    """Activation checkpointing runs forward hooks a second time."""
    anchors = graph_of("checkpointing_reentrant").anchors
    assert max(a.occurrence for a in anchors if a.subject == "model/1") == 2


def test_every_graph_has_anchors_in_order() -> None:
    """Positions rise, and the last is the iteration's end."""
    for name in ("optimizer_in_backward", "checkpointing_not_reentrant", "gan", "recurrent"):
        graph = graph_of(name)
        positions = [anchor.position for anchor in graph.anchors]
        assert positions == sorted(set(positions))
        assert graph.anchors[-1] == Anchor(AnchorKind.ITERATION_END, "", 1, graph.steps)


def test_all_hooks_are_removed() -> None:
    """The traced training is left as it was built."""
    built: list[Training] = []

    def factory() -> Training:
        model, (x, y) = mlp(), batch()
        sgd = optim.SGD(model.parameters(), 0.1)

        def iteration() -> None:
            torch.autograd.backward(F.cross_entropy(model(x), y))
            sgd.step()
            sgd.zero_grad()

        built.append(Training(model, sgd, iteration))
        return built[0]

    trace_training(factory, model="m", real=True)
    for model in built[0].models:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    (optimizer,) = built[0].optimizers
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_of_the_hooks_at_one_position_the_one_after_which_memory_was_freed_stays() -> None:
    """Between the first optimizer's post hook and the second model's forward, zero_grad frees all gradients."""

    def training() -> Training:
        models = [torch.nn.Linear(8, 8) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        x = torch.ones(2, 8)

        def iteration() -> None:
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.autograd.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()

        return Training(models, optimizers, iteration)

    kept = [(anchor.kind, anchor.subject) for anchor in trace_training(training, model="two").graph.anchors]
    assert (AnchorKind.FORWARD_PRE, "model.1") in kept
    assert (AnchorKind.OPTIMIZER, "optimizer.0") not in kept


def test_a_foreach_update_has_an_anchor_before_each_of_its_functions() -> None:
    """Where the weights' decay ends and the moments begin, say; torch's own optimizers alone are looked into."""

    class Own(optim.AdamW):
        """Its `step()` might do anything."""

    def positions(make: type[optim.AdamW]) -> list[tuple[str, int]]:
        def factory() -> Training:
            model = nn.Linear(4, 3)
            adamw = make(model.parameters(), foreach=True)

            def iteration() -> None:
                torch.autograd.backward(model(torch.ones(2, 4)).sum())
                adamw.step()

            return Training(model, adamw, iteration)

        graph = trace_training(factory, model="m").graph
        first = next(a.position for a in graph.anchors if a.kind is AnchorKind.OPTIMIZER_PRE)
        return [(a.subject, a.position - first) for a in graph.anchors if a.kind is AnchorKind.UPDATE]

    assert positions(optim.AdamW) == [
        (f"optimizer/_foreach_{name}", operators)
        for operators, name in enumerate(("lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_"), start=1)
    ]
    assert positions(Own) == []
