"""One training under one contender, inside a worker: its calls timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from contenders import Contender, Job

import checkflow

from .orders import Restored, Saved, Turn
from .workloads import digest


class Session:
    """The contender's calls around the update are made by hooks of the optimizer, so that any training will do."""

    def __init__(self, kind: type[Contender], job: Job, training: checkflow.Training) -> None:
        kind.preload()
        began = time.perf_counter()
        self._training = training
        self._tool = kind(job, training)
        self._completed = 0
        self._called_s = 0.0
        self._hooks = [
            training.optimizers[0].register_step_pre_hook(lambda *_: self._timed(self._tool.before_update)),
            training.optimizers[0].register_step_post_hook(lambda *_: self._timed(self._tool.after_update)),
        ]
        self._cuda = next(training.models[0].parameters()).is_cuda
        self._attach_s = time.perf_counter() - began

    def train(self, iterations: int) -> Turn:
        times_s, blocked_s = [], []
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(iterations):
            blocked = self._blocked_s()
            began = time.perf_counter()
            self.iterate()
            if self._cuda:
                torch.cuda.current_stream().synchronize()
            times_s.append(time.perf_counter() - began)
            blocked_s.append(self._blocked_s() - blocked)
        peak = torch.cuda.max_memory_allocated() if self._cuda else 0
        return Turn(tuple(times_s), tuple(blocked_s), peak)

    def iterate(self, completed: Callable[[int], None] = lambda _: None) -> None:
        """One iteration; tells how many are completed, and then the tool."""
        self._training.iteration()
        self._completed += 1
        completed(self._completed)
        self._timed(lambda: self._tool.after_iteration(self._completed))

    def save_one(self) -> Saved:
        self._training.iteration()
        self._completed += 1
        if self._cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        self._tool.after_iteration(self._completed)
        blocked_s = time.perf_counter() - began
        self._tool.wait()
        complete_s = time.perf_counter() - began
        return Saved(blocked_s, complete_s, self._completed, digest(self._training))

    def restore(self) -> Restored:
        began = time.perf_counter()
        self._completed = self._tool.restore()
        if self._cuda:
            torch.cuda.synchronize()
        took_s = time.perf_counter() - began
        return Restored(self._completed, self._attach_s, took_s, digest(self._training))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._tool.close()

    def _timed(self, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        self._called_s += time.perf_counter() - began

    def _blocked_s(self) -> float:
        return self._called_s + self._tool.hidden_s()
