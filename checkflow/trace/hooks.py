"""Hooks for one iteration: where anchors fire, and which storages become gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident

import torch

from checkflow.foreach import Look, can_look
from checkflow.graph import Anchor, AnchorKind, Role
from checkflow.module_hook import ModuleHook
from checkflow.state.holders import models_of, optimizers_of, unwrapped
from checkflow.state.live import parameter_names, parameters_of
from checkflow.state.memory import has_storage
from checkflow.state.names import StateName, subject_of
from checkflow.state.shards import local
from checkflow.torch_internals import TorchDispatchMode, sees_this_thread
from checkflow.trace.storages import Ledger
from checkflow.training import Training
from checkflow.wrapped import is_hookable

# Of the hooks at one position between which nothing was freed, the first of these stays, then the outermost subject.
_PREFERENCE = (
    AnchorKind.ITERATION_END,
    AnchorKind.OPTIMIZER_PRE,
    AnchorKind.OPTIMIZER,
    AnchorKind.UPDATE,
    AnchorKind.GRADIENT,
    AnchorKind.FORWARD_PRE,
    AnchorKind.FORWARD,
)


class FiredAnchors:
    """The anchors that fire while an iteration runs."""

    def __init__(self, ledger: Ledger, recorder: TorchDispatchMode) -> None:
        """Made in the iteration's thread, whose operators `recorder` sees."""
        self.unrecorded = ""  # what ran in a thread whose operators nobody sees
        self._ledger = ledger
        self._recorder = recorder
        self._thread = get_ident()
        self._counts: Counter[tuple[AnchorKind, str]] = Counter()
        self.all: list[tuple[Anchor, int]] = []  # with the storages that had died by then

    def fire(self, kind: AnchorKind, subject: str) -> None:
        if get_ident() != self._thread and not sees_this_thread(self._recorder):
            self.unrecorded = self.unrecorded or subject
        self._counts[kind, subject] += 1
        anchor = Anchor(kind, str(subject), self._counts[kind, subject], self._ledger.step)
        self.all.append((anchor, self._ledger.deaths))

    def kept(self) -> tuple[Anchor, ...]:
        """One for each position, in order of position: the last ones, after which the least memory is still held."""
        best: dict[int, tuple[tuple[int, int, int], Anchor]] = {}
        for anchor, deaths in self.all:
            rank = _rank(anchor, deaths)
            if anchor.position not in best or rank < best[anchor.position][0]:
                best[anchor.position] = rank, anchor
        return tuple(best[position][1] for position in sorted(best))


def _rank(anchor: Anchor, deaths: int) -> tuple[int, int, int]:
    depth = anchor.subject.count(".") + anchor.subject.count("/")
    return -deaths, _PREFERENCE.index(anchor.kind), depth


@contextmanager
def hooked(training: Training, firings: FiredAnchors, ledger: Ledger) -> Iterator[None]:
    """Hooks on all modules, parameters and optimizers of a training, for as long as this is active."""
    handles: list[torch.utils.hooks.RemovableHandle] = []
    seen: set[torch.nn.Module] = set()
    try:
        for holder, model in models_of(training).items():
            for path, module in unwrapped(model).named_modules():
                if module not in seen:
                    seen.add(module)
                    handles += _on_module(module if path else model, subject_of(holder, path), firings)
        for name, parameter in parameters_of(training):
            if parameter.requires_grad:
                handles += _on_parameter(parameter, name, firings, ledger)
        names = parameter_names(training)
        for holder, optimizer in optimizers_of(training).items():
            if is_hookable(optimizer):
                handles += _on_optimizer(optimizer, holder, firings, ledger, names)
        yield
    finally:
        for handle in handles:
            handle.remove()


def mark_gradient(parameter: torch.Tensor, name: str, ledger: Ledger) -> None:
    """The storage of a parameter's gradient, if it has one, is a gradient, or several of them, one after the other."""
    gradient = None if parameter.grad is None else local(parameter.grad)
    if gradient is not None and has_storage(gradient):
        storage = ledger.see(gradient)
        storage.role = storage.role or Role.GRADIENT
        storage.scalar = False
        start = int(gradient.storage_offset()) * gradient.element_size()
        if gradient.numel():
            storage.gradients[str(name)] = start, start + gradient.numel() * gradient.element_size()


def _on_module(module: torch.nn.Module, subject: str, firings: FiredAnchors) -> list[torch.utils.hooks.RemovableHandle]:
    def before(_module: torch.nn.Module, _args: object) -> None:
        firings.fire(AnchorKind.FORWARD_PRE, subject)

    def after(_module: torch.nn.Module, _args: object, _result: object) -> None:
        firings.fire(AnchorKind.FORWARD, subject)

    return [module.register_forward_pre_hook(ModuleHook(before)), module.register_forward_hook(ModuleHook(after))]


def _on_parameter(
    parameter: torch.nn.Parameter, name: str, firings: FiredAnchors, ledger: Ledger
) -> list[torch.utils.hooks.RemovableHandle]:
    """A tensor hook is the anchor: post-accumulate hooks of the user, which may update, run before a later one."""

    def ready(_gradient: torch.Tensor) -> None:
        firings.fire(AnchorKind.GRADIENT, name)

    def accumulated(updated: torch.Tensor) -> None:
        mark_gradient(updated, name, ledger)

    return [
        parameter.register_hook(ready),  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(accumulated),  # type: ignore[no-untyped-call]
    ]


def _on_optimizer(
    optimizer: torch.optim.Optimizer,
    subject: str,
    firings: FiredAnchors,
    ledger: Ledger,
    names: Mapping[int, StateName],
) -> list[torch.utils.hooks.RemovableHandle]:
    def before(stepping: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        for group in stepping.param_groups:
            for parameter in group["params"]:
                mark_gradient(parameter, names.get(id(parameter), ""), ledger)
        firings.fire(AnchorKind.OPTIMIZER_PRE, subject)
        if can_look(stepping):
            look.open()

    def inside(function: str, _tensors: object) -> None:
        firings.fire(AnchorKind.UPDATE, subject_of(subject, function))

    def after(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        look.close()
        firings.fire(AnchorKind.OPTIMIZER, subject)

    look = Look(inside, firings)
    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
