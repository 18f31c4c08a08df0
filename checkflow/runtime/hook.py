"""Hooks of one training: anchors and guards, placed so that they run before the code they are for.

A hook that torch.compile traces does nothing; compiled wrappers are hooked from outside. In an iteration that no
checkpoint is filled or due in most of them leave the executor alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from checkflow.module_hook import ModuleHook
from checkflow.runtime.compiled import OnCompile
from checkflow.runtime.factors import FactorHooks
from checkflow.runtime.follower import Follower
from checkflow.runtime.guards import Guard, GuardKind
from checkflow.runtime.update import Update
from checkflow.state.holders import models_of, optimizers_of, parts_of, unwrapped
from checkflow.state.names import StateName, in_state_dict, subject_of
from checkflow.torch_internals import (
    is_persistent,
    own_buffers,
    own_parameters,
    step_post_hooks,
    step_pre_hooks,
    takes_load_hooks,
)
from checkflow.training import Training
from checkflow.wrapped import is_hookable, optimizers_in


class Removable(Protocol):
    """A hook in place."""

    def remove(self) -> None: ...


def register(executor: Follower, training: Training) -> list[Removable]:
    """Hooks at the anchors of the timetable, and guards everywhere. Removing what is returned undoes it."""
    handles: list[Removable] = [OnCompile(executor.compiling)]
    executor.look_for_graphs()
    guards: list[Guard] = []
    if executor.parts is not None and executor.parts.factors.names:
        handles.append(executor.parts.factors.watch_unscaling())
    for holder, model in models_of(training).items():
        _on_model(executor, model, holder, handles, guards)
    for number, (holder, optimizer) in enumerate(optimizers_of(training).items()):
        if is_hookable(optimizer):
            guards.append(Guard(GuardKind.OPTIMIZER, number))
            handles += _on_optimizer(executor, optimizer, holder, number, guards[-1])
    executor.bound.watch(guards)
    return handles


def _on_model(
    executor: Follower, model: torch.nn.Module, holder: str, handles: list[Removable], guards: list[Guard]
) -> None:
    anchors = executor.timetable.hooked
    original = unwrapped(model)
    if original is not model:
        guards.append(Guard(GuardKind.FORWARD, model, inside=tuple(original.modules())))
        handles += _on_module(executor, model, holder, guards[-1], first=True)
    for path, module in original.named_modules():
        subject = subject_of(holder, path)
        first = module is original  # tells that the next iteration has begun
        anchored = first or ("forward_pre", subject) in anchors or ("forward", subject) in anchors
        persistent = [name for name in own_buffers(module) if is_persistent(module, name)]
        guard = Guard(GuardKind.FORWARD, module) if persistent else None
        if guard is not None:
            guards.append(guard)
        if (anchored or guard is not None) and not (module is original and original is not model):
            handles += _on_module(executor, module, subject, guard, first=first)
        if own_parameters(module) or persistent:
            guards.append(Guard(GuardKind.LOAD, module))
            handles.append(module.register_load_state_dict_pre_hook(ModuleHook(_loading(executor, guards[-1]))))
    for name, parameter in original.named_parameters():
        subject = StateName.of(holder, in_state_dict(name))
        if parameter.requires_grad and ("gradient", subject) in anchors:
            hook = _gradient(executor, subject)
            handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
    if executor.parts is not None:
        handles += _on_layers(executor, executor.parts.factors, original, holder)


def _on_layers(
    executor: Follower, factors: FactorHooks, model: torch.nn.Module, holder: str
) -> Iterator[RemovableHandle]:
    """Where gradients leave as their factors."""
    for path, module in parts_of(model):
        name = StateName.of(holder, f"{path}.weight" if path else "weight")
        if name in factors.names and own_parameters(module).get("weight") is not None:
            yield from factors.watch(name, module, lambda: executor.awake, executor.factored)


def _on_module(
    executor: Follower, module: torch.nn.Module, subject: str, guard: Guard | None, *, first: bool
) -> list[RemovableHandle]:
    anchored = ("forward_pre", subject) in executor.timetable.hooked

    def before(_module: torch.nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling():
            return
        if first or (anchored and executor.listens):
            executor.reach("forward_pre", subject)
        else:
            executor.touched = True
        if guard is not None and (executor.awake or guard.unplanned):
            executor.guard(guard)

    def after(_module: torch.nn.Module, _args: object, _result: object) -> None:
        if not torch.compiler.is_compiling() and executor.listens:
            executor.reach("forward", subject)

    # Before a user's hook that writes buffers.
    handles = [module.register_forward_pre_hook(ModuleHook(before), prepend=True)]
    if ("forward", subject) in executor.timetable.hooked:
        handles.append(module.register_forward_hook(ModuleHook(after)))
    return handles


def _gradient(executor: Follower, subject: str) -> Callable[[torch.Tensor], None]:
    """A tensor hook: a user's post-accumulate hook, which may update the parameter, runs after it."""

    def ready(_gradient: torch.Tensor) -> None:
        if executor.listens:
            executor.reach("gradient", subject)
        else:
            executor.touched = True

    return ready


def _loading(executor: Follower, guard: Guard) -> Callable[..., None]:
    def before(*_args: object) -> None:
        executor.guard(guard)

    return before


def _on_optimizer(
    executor: Follower, optimizer: torch.optim.Optimizer, subject: str, number: int, guard: Guard
) -> list[Removable]:
    def before(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if executor.listens:
            executor.reach("optimizer_pre", subject)
        if executor.parts is not None:
            executor.parts.overtaken = update.is_overtaken
        update.begin()
        executor.guard(guard)

    def after(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        update.end()
        if holds_others:
            executor.wrote(guard.storages, guard.kind)
        executor.wrote(guard.received, GuardKind.LOAD)  # no counter tells of it, nor whether it changed anything
        executor.updated(number)
        if executor.listens:
            executor.reach("optimizer", subject)

    update = Update(executor, optimizer, subject, guard)
    executor.consult(update)
    holds_others = len(optimizers_in(optimizer)) > 1
    loading = Guard(GuardKind.LOAD, number)
    executor.bound.watch([loading])

    def before_load(_optimizer: torch.optim.Optimizer, _state: object) -> None:
        executor.guard(loading)

    def after_load(_optimizer: torch.optim.Optimizer) -> None:
        executor.rebind()

    def made(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if not torch.compiler.is_compiling():
            executor.made(number)

    def consumes(_optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not torch.compiler.is_compiling():
            executor.consumes(number, (*args[1:], *kwargs.values()))

    first = optimizer.register_step_pre_hook(before)
    step_pre_hooks(optimizer).move_to_end(first.id, last=False)  # before a user's hook that writes
    handles: list[Removable] = [update, first, optimizer.register_step_post_hook(after)]
    if executor.parts is not None:  # what a user's hooks do lies before or after: they may clip, or write
        before_it, after_it = optimizer.register_step_pre_hook(consumes), optimizer.register_step_post_hook(made)
        update.is_last(before_it.id)
        step_post_hooks(optimizer).move_to_end(after_it.id, last=False)
        handles += [before_it, after_it]
    if takes_load_hooks(optimizer):
        handles += [
            optimizer.register_load_state_dict_pre_hook(before_load),
            optimizer.register_load_state_dict_post_hook(after_load),
        ]
    return handles
