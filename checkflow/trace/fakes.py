"""What common code does to its tensors and torch's fake ones refuse: copies, conversions in place, NumPy, foreach."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from checkflow.torch_internals import FakeTensor, FakeTensorMode, fake_tensor_log, foreach_takes, without_modes
from checkflow.trace.execution import DataDependent, reader
from checkflow.trace.replaced import replaced
from checkflow.trace.values import Values


@contextmanager
def fake_tensors(mode: FakeTensorMode | None, values: Values) -> Iterator[None]:
    """Activate a fake mode in which copy.deepcopy(module) and module.to(...) work; nothing where `mode` is None.

    tensor.numpy() and f"{tensor:.3f}" read values.
    """
    if mode is None:
        yield
        return
    logger = fake_tensor_log()
    level = logger.level
    with ExitStack() as stack:
        logger.setLevel(logging.CRITICAL)  # an operator that fails is reported in one line, not logged
        stack.callback(logger.setLevel, level)
        stack.enter_context(replaced(torch.Tensor, "__deepcopy__", _deepcopy))
        stack.enter_context(replaced(torch.Tensor, "numpy", _numpy(torch.Tensor.numpy, values)))
        stack.enter_context(replaced(torch.Tensor, "__format__", _format))
        stack.enter_context(replaced(torch.utils, "swap_tensors", _swap(torch.utils.swap_tensors)))
        stack.enter_context(foreach_takes(FakeTensor))
        stack.enter_context(mode)
        yield


_original_deepcopy = torch.Tensor.__deepcopy__


def _deepcopy(tensor: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
    """A leaf's copy by clone(): the original reads the address of its data, and fake tensors have none."""
    known = memo.get(id(tensor))
    if isinstance(known, torch.Tensor):
        return known
    if not tensor.is_leaf:
        return _original_deepcopy(tensor, memo)  # type: ignore[no-any-return, no-untyped-call]
    copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = _deepcopy(tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


_original_format = torch.Tensor.__format__


def _format(tensor: torch.Tensor, spec: str) -> str:
    """The original does it for torch.Tensor alone."""
    if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
        return tensor.item().__format__(spec)
    return _original_format(tensor, spec)  # type: ignore[no-any-return, no-untyped-call]


def _numpy(original: Callable[..., object], values: Values) -> Callable[..., object]:
    def numpy(tensor: torch.Tensor, *, force: bool = False) -> object:
        """Of the value, where that is known."""
        if not isinstance(tensor, FakeTensor) or (tensor.requires_grad and not force):
            return original(tensor, force=force)
        value = values.of(tensor)
        if value is None:
            raise DataDependent("numpy()", reader())
        with without_modes():
            return original(value, force=force)

    return numpy


def _swap(original: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def swap_tensors(kept: torch.Tensor, converted: torch.Tensor) -> None:
        """Module._apply drops `converted` next, so that taking over its data is enough."""
        if not isinstance(kept, FakeTensor) or not isinstance(converted, FakeTensor):
            original(kept, converted)
            return
        kept.data = converted
        kept.fake_device = converted.fake_device

    return swap_tensors
