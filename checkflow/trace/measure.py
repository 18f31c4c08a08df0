"""Operator times, measured on the device at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from checkflow.errors import TraceError
from checkflow.torch_internals import OpOverload, TorchDispatchMode, can_decompose
from checkflow.trace.recorder import QUIET, Calls
from checkflow.trace.stopwatch import Elapsed, Stopwatch

MEASURED_ITERATIONS = 7
_ATTEMPTS = 3 * MEASURED_ITERATIONS


def measured(iteration: Callable[[], object], calls: Calls, *, on_cuda: bool, model: str) -> list[int]:
    """Median nanoseconds of each step, over iterations that repeat the recorded calls exactly.

    On CUDA the time between events around the operator; on a CPU the wall time of the call. Raises TraceError where
    the sequence of operators differs from iteration to iteration.
    """
    expected = [func for func, _ in calls]
    samples: list[list[int]] = []
    for _ in range(_ATTEMPTS):
        timed = _Timed(on_cuda)
        with timed:
            iteration()
        if timed.funcs == expected:
            samples.append(timed.times_ns())
        if len(samples) == MEASURED_ITERATIONS:
            break
    else:
        raise TraceError(
            f"{model}: only {len(samples)} of {_ATTEMPTS} iterations ran the recorded operators; measuring needs "
            f"{MEASURED_ITERATIONS}: use a modelled device, or make every iteration the same"
        )
    return [
        round(statistics.median(times))
        for times, (_, step) in zip(zip(*samples, strict=True), calls, strict=True)
        if step
    ]


class _Timed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, on_cuda: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.funcs: list[OpOverload] = []
        self._stopwatch = Stopwatch(on_cuda=on_cuda)
        self._spans: list[Elapsed] = []

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
        self._stopwatch.start()
        result = func(*args, **(kwargs or {}))
        self._spans.append(self._stopwatch.stop())
        return result

    def times_ns(self) -> list[int]:
        return [span() for span in self._spans]
