"""An iteration of a training that runs, recorded as it happens: on its own tensors, with the times that it took.

Operators run as they would have: the recorder looks on. Begun and ended between iterations, in the training's thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from checkflow.collector import paused_collector
from checkflow.graph import Graph
from checkflow.state.live import parameters_of
from checkflow.state.memory import has_storage
from checkflow.torch_internals import innermost_mode
from checkflow.torch_ranks import ranks_here
from checkflow.trace.reachable import Reached, reachable
from checkflow.trace.record import IterationRecord
from checkflow.trace.recorder import Recorder
from checkflow.trace.scratch import ScratchMeter
from checkflow.trace.stopwatch import Stopwatch
from checkflow.trace.storages import Ledger
from checkflow.trace.unlisted import Watch
from checkflow.trace.unseen import Unseen
from checkflow.trace.values import Values
from checkflow.training import Training


class LiveIteration:
    """From its making to `end` or `abandon` an iteration is recorded.

    Args:
        training: as it is when the iteration begins.
        model: who the graph is of.
        earlier: what code could reach when the iteration before began, by name.
        reached: what it can reach now.
        ignores: says that what runs now is none of the training's.
    """

    def __init__(
        self,
        training: Training,
        model: str,
        earlier: Mapping[str, Reached],
        reached: Mapping[str, Reached],
        ignores: Callable[[], bool] = lambda: False,
    ) -> None:
        ledger = Ledger()
        devices = (parameter.device for _, parameter in parameters_of(training))
        device = next((each for each in devices if each.type == "cuda"), None)
        ledger.on_cuda = device is not None
        self._over = self._left = False  # nothing is recorded any more; nor does the recorder see operators
        self._failure: Exception | None = None
        self._training = training
        self._unseen = Unseen(training, model)
        self._recorder = Recorder(
            ledger,
            None,
            Values(ledger, everything=False),
            Stopwatch(device),
            None if device is None else ScratchMeter(anew=False, device=device),  # whose peaks are the training's own
            lambda: self._over or ignores(),
            self._fails,
        )
        self._recorder.watch = Watch(ledger, earlier, training)
        for found in reached.values():
            if isinstance(found, torch.Tensor) and has_storage(found):
                ledger.see(found)  # so that it is known when it dies
        self._reached = reached
        self._record = IterationRecord(training, self._recorder, model, lambda: self._reached, None)
        self._entered = ExitStack()
        self._entered.enter_context(paused_collector())
        self._entered.enter_context(self._record.open())
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        _open.add(self)

    def _fails(self, error: Exception) -> None:
        """Training does not notice; `end` raises it."""
        self._failure, self._over = error, True

    def end(self, reached: Mapping[str, Reached], arguments: tuple[tuple[str, str], ...] = ()) -> Graph | None:
        """The iteration has ended, and this can be reached: its graph.

        None where code is still within a dispatch mode that it entered since, or in inference mode.
        Raises TraceError where no checkpoint has room for what it made of its state, or it cannot be recorded.
        """
        if not self.abandon():
            return None
        if self._failure is not None:
            raise self._failure
        self._reached = reached
        graph = self._record.graph(arguments)
        self._unseen.check(graph, self._record.targets)
        return replace(graph, world_size=ranks_here())

    def constants(self) -> frozenset[int]:
        """Identities of the storages that it read as it found them, and did not write."""
        return self._record.constants()

    def abandon(self) -> bool:
        """Look on no longer. False where that has to be tried again, when the loop has left a block that it is in."""
        self._over = True
        self._entered.close()
        is_ours_to_leave = innermost_mode() is self._recorder and not torch.is_inference_mode_enabled()
        if not self._left and is_ours_to_leave:
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._left = True
        if self._left:
            _open.discard(self)
        return self._left


_open: weakref.WeakSet[LiveIteration] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a forked child, such as a loader's worker, whose operators are none of the iteration's."""
    for live in tuple(_open):
        live.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def recorded(training: Training, model: str) -> Graph:
    """The third of three iterations that are run here. Raises TraceError as `LiveIteration.end` does."""
    training.iteration()
    earlier = reachable(training)
    training.iteration()
    live = LiveIteration(training, model, earlier, reachable(training))
    try:
        training.iteration()
    except BaseException:
        live.abandon()
        raise
    graph = live.end(reachable(training))
    assert graph is not None, "the iteration left a dispatch mode entered"
    return graph
