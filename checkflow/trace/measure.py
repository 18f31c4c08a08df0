"""Operator times, measured on the device at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from checkflow.errors import TraceError
from checkflow.torch_internals import OpOverload, TorchDispatchMode, can_decompose
from checkflow.trace.recorder import QUIET

MEASURED_ITERATIONS = 7
_ATTEMPTS = 3 * MEASURED_ITERATIONS

Calls = Sequence[tuple[OpOverload, bool]]


def measured(iteration: Callable[[], object], calls: Calls, *, on_cuda: bool, model: str) -> list[int]:
    """Median nanoseconds of each step, over iterations that repeat the recorded calls exactly.

    On CUDA the time between events around the operator; on a CPU the wall time of the call. Raises TraceError where
    the sequence of operators differs from iteration to iteration.
    """
    expected = [func for func, _ in calls]
    samples: list[list[int]] = []
    for _ in range(_ATTEMPTS):
        stopwatch = _Stopwatch(on_cuda)
        with stopwatch:
            iteration()
        if stopwatch.funcs == expected:
            samples.append(stopwatch.times_ns())
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


class _Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, on_cuda: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.funcs: list[OpOverload] = []
        self._on_cuda = on_cuda
        self._spans_ns: list[int] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

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
        if self._on_cuda:
            begin, end = _event(), _event()
            begin.record()
            result = func(*args, **(kwargs or {}))
            end.record()
            self._events.append((begin, end))
        else:
            start = time.perf_counter_ns()
            result = func(*args, **(kwargs or {}))
            self._spans_ns.append(time.perf_counter_ns() - start)
        return result

    def times_ns(self) -> list[int]:
        if not self._on_cuda:
            return self._spans_ns
        torch.cuda.synchronize()
        return [round(begin.elapsed_time(end) * 1e6) for begin, end in self._events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
