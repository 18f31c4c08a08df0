"""What kind of iteration one is, told by its calls: which model on which shapes, which optimizer, in which order.

A plan is of one kind. Others are as correct under it, and may be slower: what was planned to leave while a layer
computes may have to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from itertools import groupby

import torch
from torch.utils.hooks import RemovableHandle

from checkflow.module_hook import ModuleHook
from checkflow.state.holders import models_of, optimizers_of
from checkflow.training import Training
from checkflow.wrapped import is_hookable

_MOST_CALLS = 10_000  # of an iteration that are told apart
_LONGEST = 300  # characters of a text
_KEPT = 100  # texts

Call = str | tuple[str, bool, tuple[torch.Size, ...]]  # an optimizer; a model, whether it trains, and on what shapes


class Kinds:
    """Notes the calls of each iteration, by hooks on models and optimizers."""

    def __init__(self, training: Training) -> None:
        self._calls: list[Call] = []
        self._texts: dict[tuple[Call, ...], str] = {}
        self._hooks: list[RemovableHandle] = []
        self._optimizers = 0  # that are seen
        self._updates = False
        self.updated = True  # whether the iteration that ended made an update; or nothing tells of any
        for holder, model in models_of(training).items():
            self._hooks.append(model.register_forward_pre_hook(ModuleHook(self._model(holder)), with_kwargs=True))
        for holder, optimizer in optimizers_of(training).items():
            if is_hookable(optimizer):
                self._optimizers += 1
                self._hooks.append(optimizer.register_step_pre_hook(self._optimizer(holder)))

    def ended(self) -> str:
        """The kind of the iteration that ended, in words: "2 x model(8x3x32x32), optimizer"."""
        calls, self._calls = tuple(self._calls), []
        self.updated, self._updates = self._updates or not self._optimizers, False
        if calls not in self._texts:
            if len(self._texts) > _KEPT:
                self._texts.clear()
            self._texts[calls] = _text(calls)
        return self._texts[calls]

    def remove(self) -> None:
        """Note nothing any more."""
        while self._hooks:
            self._hooks.pop().remove()

    def _model(self, holder: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if not torch.compiler.is_compiling() and len(self._calls) < _MOST_CALLS:
                given = (*args, *kwargs.values()) if kwargs else args
                shapes = tuple(value.shape for value in given if isinstance(value, torch.Tensor))
                self._calls.append((holder, module.training, shapes))

        return before

    def _optimizer(self, holder: str) -> Callable[..., None]:
        def before(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
            self._updates = True
            if len(self._calls) < _MOST_CALLS:
                self._calls.append(holder)

        return before


def _text(calls: tuple[Call, ...]) -> str:
    parts = []
    for call, group in groupby(calls):
        count = len(list(group))
        if isinstance(call, str):
            word = call
        else:
            holder, training, shapes = call
            of_shapes = ", ".join("x".join(map(str, shape)) for shape in shapes)
            word = f"{holder}({of_shapes})" if training else f"{holder}.eval({of_shapes})"
        parts.append(f"{count} x {word}" if count > 1 else word)
    text = ", ".join(parts)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... {sha256(text.encode()).hexdigest()[:8]}"
