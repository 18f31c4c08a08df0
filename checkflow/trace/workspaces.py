"""What kernels keep for their backward pass and torch's fake tensors leave out, or get wrong.

An operator whose kernel resizes its arguments leaves fake ones as they are: they are resized before it.

Where an operator's fake results may have other sizes than real ones, it runs once on zeros of the same shapes, and the
results get the layout that it answers with. tests/trace/test_workspaces.py compares every operator that a trace of the
bundled networks meets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from checkflow.torch_internals import OpOverload, schema_of, tree_map, without_modes
from checkflow.trace.storages import Ledger, is_fake
from checkflow.trace.values import Values
from checkflow.trace.writes import aten, named_arguments, tensors_in

# oneDNN's workspace and cuDNN's reserve: their fake results are empty.
_RECURRENT = aten("mkldnn_rnn_layer _cudnn_rnn miopen_rnn")
# Their saved statistics have the type of the parameters, which autocast leaves in 32 bits.
_NORMS = aten("native_batch_norm _native_batch_norm_legit")
# Where it first observes, it makes what it keeps of each channel as large as there are channels.
_OBSERVED = aten("_fused_moving_avg_obs_fq_helper")

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Workspaces:
    """Corrects fake results; remembers what it found out, so that each layer is tried once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._layouts: dict[str, tuple[Layout, ...]] = {}

    def corrected(
        self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        """The result, with fake tensors of the right size. Call it where the fake mode is active."""
        if schema_of(func).name in _RECURRENT:
            return self._tried(func, args, kwargs, result)
        if schema_of(func).name in _NORMS:
            return _with_statistics(args, result)
        return result

    def _tried(
        self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        key = repr((func, tree_map(_described, (args, dict(kwargs)))))
        if key not in self._layouts:
            self._ledger.check_room(sum(t.untyped_storage().nbytes() for t in tensors_in([*args, result])))
            with without_modes():
                real = func(*tree_map(_zeros, args), **tree_map(_zeros, dict(kwargs)))
                self._layouts[key] = tuple((t.size(), t.stride(), t.dtype) for t in tensors_in(real))
        assert isinstance(result, tuple)
        return tuple(map(_laid_out, result, self._layouts[key]))


def resized_by_kernel(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], values: Values
) -> tuple[list[torch.Tensor], int]:
    """The arguments that an operator's kernel will resize, and to how many elements."""
    if schema_of(func).name not in _OBSERVED:
        return [], 0
    given = dict(named_arguments(func, args, kwargs))
    observed, axis, is_on = given["self"], given["ch_axis"], given["observer_on"]
    kept = [t for name in ("running_min", "running_max", "scale", "zero_point") for t in tensors_in(given[name])]
    assert isinstance(observed, torch.Tensor) and isinstance(axis, int) and isinstance(is_on, torch.Tensor)
    known = values.of(is_on) if is_fake(is_on) else is_on
    with without_modes():
        is_off = known is not None and not known.item()
    return ([], 0) if is_off or not given.get("per_row_fake_quant") or kept[0].numel() else (kept, observed.size(axis))


def resize(tensors: Sequence[torch.Tensor], elements: int, ledger: Ledger) -> None:
    """As a kernel would. Call it where the fake mode is active."""
    for tensor in tensors:
        ledger.forget(ledger.see(tensor))
        with nullcontext() if is_fake(tensor) else without_modes(), torch.no_grad():
            tensor.resize_(elements)


def _described(value: object) -> object:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _zeros(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    device = value.fake_device if is_fake(value) else value.device  # type: ignore[attr-defined]
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device).zero_()


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    size, stride, dtype = layout
    if (tensor.size(), tensor.dtype) == (size, dtype):
        return tensor
    return torch.empty_strided(size, stride, dtype=dtype, device=tensor.device)


def _with_statistics(args: tuple[object, ...], result: object) -> object:
    """(input, weight, bias, running_mean, ...) -> (output, mean, reciprocal deviation)"""
    output, *statistics = tensors_in(result)
    parameter = next((t for t in args[1:5] if isinstance(t, torch.Tensor)), None)
    if parameter is None or output.device.type != "cpu":
        return result
    return (output, *(_laid_out(t, (t.size(), t.stride(), parameter.dtype)) for t in statistics))
