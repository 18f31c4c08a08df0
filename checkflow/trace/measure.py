"""Operators' times and the memory that they take for themselves, measured on the device at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkflow.errors import TraceError
from checkflow.torch_internals import OpOverload, TorchDispatchMode, can_decompose
from checkflow.trace.recorder import QUIET, Calls
from checkflow.trace.scratch import ScratchMeter
from checkflow.trace.stopwatch import Stopwatch

MEASURED_ITERATIONS = 7
_ATTEMPTS = 3 * MEASURED_ITERATIONS


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """Of each step."""

    times_ns: list[int]  # medians
    scratch_bytes: list[int]  # that it allocates and frees again before it returns; of CUDA alone


def measured(iteration: Callable[[], object], calls: Calls, *, on_cuda: bool, model: str) -> OperatorCosts:
    """What the recorded operators take, over iterations that repeat them exactly.

    On CUDA times are those between events around an operator, and one more iteration asks the allocator, whose peak
    statistics begin anew with it; on a CPU they are the wall times of calls. Raises TraceError where the sequence of
    operators differs from iteration to iteration.
    """
    expected = [func for func, _ in calls]
    samples: list[list[int]] = []
    wanted = MEASURED_ITERATIONS + on_cuda
    for _ in range(_ATTEMPTS):
        meter = (
            ScratchMeter(anew=True)
            if on_cuda and len(samples) == MEASURED_ITERATIONS
            else Stopwatch(torch.device("cuda") if on_cuda else None)
        )
        metered = _Metered(meter)
        with metered:
            iteration()
        if metered.funcs == expected:
            samples.append([found() for found, (_, step) in zip(metered.found, calls, strict=True) if step])
        if len(samples) == wanted:
            break
    else:
        raise TraceError(
            f"{model}: only {len(samples)} of {_ATTEMPTS} iterations ran the recorded operators; measuring needs "
            f"{wanted}: use a modelled device, or make every iteration the same"
        )
    times = zip(*samples[:MEASURED_ITERATIONS], strict=True)
    return OperatorCosts(
        [round(statistics.median(each)) for each in times], samples[-1] if on_cuda else [0] * len(samples[0])
    )


class _Metered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, meter: Stopwatch | ScratchMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.funcs: list[OpOverload] = []
        self.found: list[Callable[[], int]] = []
        self._meter = meter

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.namespace in QUIET:
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled() and can_decompose(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.funcs.append(func)
        self._meter.start()
        result = func(*args, **(kwargs or {}))
        self.found.append(self._meter.stop())
        return result
