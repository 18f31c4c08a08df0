"""Each name that PyTorch keeps to itself and checkflow uses all the same, behind a function that says what it gives.

A new release may take any of them away: tests/test_torch_internals.py then says which. No other file names one, but
torch_ranks.py those of processes and of what they share.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.optim.optimizer import _foreach_supported_types as _types_in_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _types_in_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map as tree_map
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

MODULE_DICTS = ("_modules", "_parameters", "_buffers")  # where a module keeps what is in it
EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX  # the end of the state_dict's key of what get_extra_state gives
COMPILED_FROM = "_orig_mod"  # where torch.compile's wrapper keeps what it wraps; so do paths through it
CHECKPOINTED = "_checkpoint_wrapped_module"  # the same of torch's checkpoint_wrapper and offload_wrapper
SCALER_TENSORS = ("_scale", "_growth_tracker")  # where a GradScaler keeps what it updates; None before its first use

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
Loader = torch.utils.data.DataLoader[Any]
Pass = _BaseDataLoaderIter
_version = attrgetter("_version")
_without_hooks: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

# Tensors


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was written, as far as its writers count. Inference tensors have no counter, and raise."""
    return list(map(_version, tensors))


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for all objects that stand for one storage, and no other's while that lives."""
    identity: int = storage._cdata
    return identity


def generator_id(generator: torch.Generator) -> int:
    """The same for all objects that stand for one generator, and no other's while that lives."""
    identity: int = generator._cdata  # type: ignore[attr-defined]
    return identity


# Modules and optimizers


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Whether it keeps running statistics, which it writes in training without counting that."""
    return isinstance(module, _NormBase)


def unhooked_step(optimizer: torch.optim.Optimizer) -> None:
    """An update as the optimizer's class makes it: no hook runs, nor what a scheduler put in its place."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


def grad_scale_of(optimizer: torch.optim.Optimizer) -> object:
    """By what a GradScaler has a fused update unscale its gradients; None where it has done that itself."""
    return getattr(optimizer, "grad_scale", None)


def freed_since(tensor: torch.Tensor) -> Callable[[], bool]:
    """Tells whether its storage is gone by then: another one may have its address."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return lambda: bool(reference.expired())  # type: ignore[no-untyped-call]


def others_hooks(tensor: torch.Tensor) -> int:
    """How many functions its gradient is given to, each of which may replace it; checkflow's own only look on."""
    return sum(not is_ours(hook) for hook in (tensor._backward_hooks or {}).values())


def is_ours(hook: object) -> bool:
    """Whether a hook is checkflow's own, which only looks on, as those do that record an iteration."""
    return str(getattr(hook, "__module__", "")).startswith("checkflow.")


def multiplied_by(weight: torch.Tensor, output: torch.Tensor) -> tuple[torch.autograd.graph.Node, int] | None:
    """The product with a weight that an output is a view of, as the backward pass comes to it, and which of its factors
    the weight is; None where it is none.

    A hook of the output itself is lost where something then writes into the view.
    """
    node = output.grad_fn
    while node is not None and "View" in node.name():
        node = node.next_functions[0][0]
    if node is None or node.name() not in ("AddmmBackward0", "MmBackward0"):
        return None
    for number, (factor, _) in enumerate(node.next_functions):
        if factor is not None and factor.name() == "TBackward0":
            factor = factor.next_functions[0][0]
        if factor is not None and getattr(factor, "variable", None) is weight:
            return node, number
    return None


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Those of this module alone, by name: the dict that it keeps them in."""
    return module._parameters


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The same of its children."""
    return module._modules


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The same of its buffers."""
    return module._buffers


def passing_buffers(module: torch.nn.Module) -> set[str]:
    """Names of its own buffers that are no part of its state_dict: the set that it keeps them in."""
    return module._non_persistent_buffers_set


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer is part of its state_dict."""
    return buffer not in passing_buffers(module)


def compiled_from(module: torch.nn.Module) -> object:
    """What torch.compile made this module of; None for any other."""
    return getattr(module, COMPILED_FROM, None)


def runs_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step() runs hooks: Optimizer.__init__ ran, and wrapped it.

    One that once did not never does: zero_grad() wraps it later, where a wrapper's own __init__ made only its dicts.
    """
    if optimizer in _without_hooks:
        return False
    kept = _keeps_hooks(optimizer, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if kept and getattr(type(optimizer).step, "hooked", False):
        return True
    _without_hooks.add(optimizer)
    return False


def overlaps(zero: ZeroRedundancyOptimizer) -> bool:
    """Whether it makes its updates within the backward pass, in a hook of DistributedDataParallel's."""
    return bool(zero._overlap_with_ddp)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> OrderedDict[int, Callable[..., object]]:
    """In the order that its step() runs them in, by their handles' ids."""
    hooks = optimizer._optimizer_step_pre_hooks
    assert isinstance(hooks, OrderedDict)
    return hooks


def step_post_hooks(optimizer: torch.optim.Optimizer) -> OrderedDict[int, Callable[..., object]]:
    """Likewise those that it runs when the update was made."""
    hooks = optimizer._optimizer_step_post_hooks
    assert isinstance(hooks, OrderedDict)
    return hooks


def takes_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of its load_state_dict() can be registered: Optimizer.__init__ ran."""
    return _keeps_hooks(optimizer, "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def takes_state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state_dict() can have hooks. A wrapper that never ran Optimizer.__init__ cannot."""
    return _keeps_hooks(optimizer, "_optimizer_state_dict_post_hooks")


def _keeps_hooks(optimizer: torch.optim.Optimizer, *dicts: str) -> bool:
    """Whether these are as Optimizer.__init__ makes them: handles refer to them weakly, which no plain dict allows."""
    return all(isinstance(vars(optimizer).get(name), OrderedDict) for name in dicts)


def scaler_tensors(scaler: torch.amp.GradScaler) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Its scale and how many steps that has lasted, on its device; None before its first use."""
    return scaler._scale, scaler._growth_tracker


def loader_iterator(loader: Loader) -> object:
    """What a loader keeps of its pass: the latest for torchdata's; None before there is one."""
    return loader._iterator


def passes_over(loaders: Iterable[Loader]) -> list[tuple[Loader, Pass]]:
    """Each pass over one of these that is there. A loader does not know its own: all that the garbage collector knows
    is looked through, which takes 0.1 s for a million objects."""
    by_sampler = {id(loader._index_sampler): loader for loader in loaders}
    passes = [one for one in gc.get_objects() if issubclass(type(one), Pass)]
    return [(by_sampler[id(one._index_sampler)], one) for one in passes if id(one._index_sampler) in by_sampler]


def given_by(run: Pass) -> int:
    """How many batches a pass over a loader has given."""
    given: int = run._num_yielded
    return given


# Operators


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Its name and arguments, and which of them it writes."""
    return op._schema


def unfolds(kinds: Iterable[type]) -> bool:
    """Whether an operator on such tensors becomes others, on plain ones that they hold.

    So it is of one that ranks share, and of what a collective that may still run will have made.
    """
    return any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in kinds)


def can_decompose(op: OpOverload) -> bool:
    """Whether it is made of others, which autograd calls in its place unless inference mode leaves that to us."""
    return op._can_decompose()


def foreach_functions() -> dict[str, Any]:
    """torch's functions over lists of tensors, by their names in torch, as they are there now."""
    return {name: found for name, found in vars(torch).items() if name.startswith("_foreach_") and callable(found)}


def foreach_copy(targets: Tensors, sources: Tensors, *, non_blocking: bool) -> None:
    """Copy each source to its target, many small ones in few kernels."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def without_modes() -> AbstractContextManager[object]:
    """Within, operators run as if no dispatch mode was active."""
    return _disable_current_modes()


def fake_device(op: OpOverload, args: tuple[object, ...]) -> torch.device | None:
    """The answer, where an operator asks a fake tensor for its device, as most in a trace do; None for another."""
    if op is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        device: torch.device = args[0].fake_device
        return device
    return None


def innermost_mode() -> object:
    """The dispatch mode of this thread that sees an operator first; None where there is none."""
    return _get_current_dispatch_mode()


def block_around() -> str:
    """What the caller is within that, when it ends, sets this thread's dispatch back to how it began, or takes off
    whatever mode is the innermost one: a mode that is entered or left inside it may not outlive it. "" for none.

    inference_mode(False) does so, too, and nothing tells that it is there.
    """
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode()"
    mode = innermost_mode()
    return "" if mode is None else f"{type(mode).__name__}(), a dispatch mode"


def sees_this_thread(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode sees operators of this thread: modes are of a thread, and of autograd's own for it."""
    return any(each is mode for each in _get_current_dispatch_mode_stack())


def below_autograd() -> AbstractContextManager[object]:
    """Within, operators run as autograd calls them: nothing is recorded."""
    return torch._C._AutoDispatchBelowAutograd()


# Fake tensors and torch.compile


@contextmanager
def foreach_takes(kind: type[torch.Tensor]) -> Iterator[None]:
    """Within, gradient clipping and optimizers use foreach functions for this type too; they ask for the exact one."""
    for supported in (_types_in_utils, _types_in_optimizers):
        supported.append(kind)
    try:
        yield
    finally:
        for supported in (_types_in_utils, _types_in_optimizers):
            supported.remove(kind)


_unscale = torch._amp_foreach_non_finite_check_and_unscale_
_sees_unscaling: list[Callable[[Tensors], None]] = []


def watch_unscaling(seen: Callable[[Tensors], None]) -> Callable[[], None]:
    """Call `seen` with the gradients that a GradScaler unscales, of which no version counter tells, until the result is
    called."""
    _sees_unscaling.append(seen)
    torch._amp_foreach_non_finite_check_and_unscale_ = _seen_unscaling  # type: ignore[assignment]  # a scaler finds it there

    def end() -> None:
        if seen in _sees_unscaling:
            _sees_unscaling.remove(seen)
        if not _sees_unscaling:
            torch._amp_foreach_non_finite_check_and_unscale_ = _unscale

    return end


def _seen_unscaling(gradients: Tensors, *others: torch.Tensor) -> None:
    for seen in tuple(_sees_unscaling):
        seen(gradients)
    _unscale(gradients, *others)


def lets_torch_choose_foreach(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer's class, or one that it derives from, has torch choose between foreach and loop where that
    is left to it. One that does not ask, as Adafactor, loops on CUDA too."""
    files = (sys.modules.get(each.__module__) for each in kind.__mro__ if each is not torch.optim.Optimizer)
    return any(hasattr(file, _default_to_fused_or_foreach.__name__) for file in files)


def are_looped(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether torch's optimizers update them one by one, whatever their device, where that is left to them."""
    return any(type(parameter) not in _types_in_optimizers for parameter in parameters)


def fake_tensor_log() -> logging.Logger:
    """Where an operator that fails on fake tensors is logged."""
    return logging.getLogger(FakeTensor.__module__)


def import_compiler() -> None:
    """Import what torch.compile runs on, which takes a second or more: processes forked after it have it at once."""
    import torch._dynamo  # noqa: F401


class Compilations:
    """torch.compile's, in this process. Made on demand: to import all that belongs to it takes seconds."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import counters

        self._handler = callback_handler
        self._counters = counters

    @property
    def happened(self) -> bool:
        """Whether there was one."""
        return bool(self._counters["frames"]["total"])

    def watch(self, act: Callable[[object], None]) -> None:
        """`act` is called whenever one begins."""
        self._handler.register_start_callback(act)

    def unwatch(self, act: Callable[[object], None]) -> None:
        """Until now, that is; nothing where it is not watching."""
        if act in self._handler.start_callbacks:
            self._handler.remove_start_callback(act)
