"""How long an operator takes: the wall time of its call on a CPU, the time between events around it on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Elapsed = Callable[[], int]  # its nanoseconds; on CUDA it may be asked once the device has come by


class Stopwatch:
    """One operator at a time."""

    def __init__(self, cuda: torch.device | None) -> None:
        """`cuda`: the device whose stream is looked at; None on a CPU."""
        self._cuda = cuda
        self._began_ns = 0
        self._began: torch.cuda.Event | None = None

    def start(self) -> None:
        """The operator is about to be called."""
        if self._cuda is not None:
            self._began = _event()
            self._began.record(torch.cuda.current_stream(self._cuda))
        else:
            self._began_ns = time.perf_counter_ns()

    def stop(self) -> Elapsed:
        """It was called."""
        if self._began is None:
            span_ns = time.perf_counter_ns() - self._began_ns
            return lambda: span_ns
        begin, end = self._began, _event()
        end.record(torch.cuda.current_stream(self._cuda))
        return lambda: _between(begin, end)


def _between(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    end.synchronize()
    return round(float(begin.elapsed_time(end)) * 1e6)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
