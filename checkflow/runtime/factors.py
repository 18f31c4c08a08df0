"""Factors of gradients: what a linear layer was given, and what came back to it.

The layer's weight has the product of both as its gradient, as long as the layer ran once, nothing else uses the weight,
nothing was there to be added to, and nothing changes the gradient or puts another in its place before its update. Each
of that is looked at in each iteration: the gradient lies where the product was made, nobody has written there, as far
as counters and a few of its elements tell (sampled.py), and it has not been freed since. That the product has the same
bits is proven with the first checkpoint, as all that is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from checkflow.module_hook import ModuleHook
from checkflow.state.memory import is_lent
from checkflow.torch_internals import freed_since, multiplied_by, others_hooks, versions, watch_unscaling

# A parameter's name, its gradient, and the factors of that.
Take = Callable[[str, torch.Tensor, tuple[torch.Tensor, torch.Tensor]], None]


@dataclass(slots=True)
class _Made:
    """What an iteration's backward passes left of a layer."""

    given: torch.Tensor | None = None  # its input, from when its output's gradient is there until the weight's is
    came_back: torch.Tensor | None = None  # likewise, the output's gradient
    times: int = 0  # that a backward pass came through the layer
    product: int = 0  # its address, where it was made
    is_gone: Callable[[], bool] | None = None  # the weight's gradient, which was the product; None: it is none
    rows: int = 0  # of each factor


@dataclass(frozen=True, slots=True)
class RemovableCall:
    """A hook in place, that this ends."""

    remove: Callable[[], None]


class FactorHooks:
    """Of one executor: what is known of the gradients that leave as their factors."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._made = {name: _Made() for name in self.names}
        self._unscaled: set[int] = set()  # addresses of gradients

    def watch_unscaling(self) -> RemovableCall:
        """A hook of every GradScaler."""
        return RemovableCall(watch_unscaling(lambda gradients: self._unscaled.update(g.data_ptr() for g in gradients)))

    def forget(self) -> None:
        """Another iteration begins."""
        for name in self.names:
            self._made[name] = _Made()
        self._unscaled.clear()

    def are_exact(self, name: str, weight: torch.Tensor) -> bool:
        """Whether the gradient that an update is about to consume is their product."""
        gradient, made = weight.grad, self._made[name]
        if gradient is None or made.times != 1 or made.is_gone is None or made.is_gone():
            return False
        if others_hooks(weight) or made.product in self._unscaled:  # it was replaced, or is not the product any more
            return False
        return gradient.data_ptr() == made.product and versions([gradient]) == [0]

    def rows(self, names: Iterable[str]) -> dict[str, int]:
        """Of each of the factors of those gradients that leave so, in the iteration that runs."""
        return {name: self._made[name].rows for name in names if name in self.names}

    def watch(
        self, name: str, layer: torch.nn.Module, listens: Callable[[], bool], take: Take
    ) -> list[RemovableHandle]:
        """Hooks of a layer whose weight has this name. `take` is given the factors when the gradient was made."""
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        transposed = isinstance(layer, torch.nn.Linear)  # (outputs, inputs): what came back is the first factor

        def ran(_layer: torch.nn.Module, inputs: tuple[object, ...], output: object) -> None:
            if torch.compiler.is_compiling() or not listens() or not isinstance(output, torch.Tensor):
                return
            given = inputs[0] if inputs else None
            if not isinstance(given, torch.Tensor) or not given.is_contiguous():  # training keeps a copy, and not this
                return
            if (found := multiplied_by(weight, output)) is not None:
                node, factor = found
                node.register_prehook(partial(came_back, [given.detach()]))
                node.register_hook(partial(multiplied, factor))

        def came_back(given: list[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> None:
            made = self._made[name]
            made.times += 1
            if given:  # it is let go of with the graph's own, though the graph stays
                made.given, made.came_back = given.pop(), gradients[0]

        def multiplied(factor: int, made: tuple[torch.Tensor | None, ...], _gradients: object) -> None:
            product = made[factor]
            self._made[name].product = 0 if product is None else product.data_ptr()

        def ready(gradient: torch.Tensor) -> None:
            made = self._made[name]
            given, returned, made.is_gone = made.given, made.came_back, None
            made.given = made.came_back = None
            if given is None or returned is None or made.times != 1 or weight.grad is not None:
                return
            if gradient.data_ptr() != made.product or versions([gradient]) != [0]:  # other products are added to it
                return
            given, returned = (each.clone() if is_lent(each) else each for each in (given, returned))
            left, right = (returned, given) if transposed else (given, returned)
            rows = left.numel() // weight.shape[0]
            if _are_factors(left, right, weight, rows):
                made.is_gone, made.rows = freed_since(gradient), rows
                take(name, gradient, (left, right))

        handles = [layer.register_forward_hook(ModuleHook(ran))]
        if weight.requires_grad:  # one that is frozen may be thawed: then its gradient is not known to be the product
            handles.append(weight.register_hook(ready))  # type: ignore[no-untyped-call]
        return handles


def _are_factors(left: torch.Tensor, right: torch.Tensor, weight: torch.Tensor, rows: int) -> bool:
    """Whether both lie in memory as rows, as many of each."""
    return all(
        each.dtype == weight.dtype and each.is_contiguous() and each.dim() and each.shape[-1] == side
        and each.numel() == rows * side
        for each, side in zip((left, right), weight.shape, strict=True)
    )  # fmt: skip
