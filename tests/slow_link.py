"""A link that carries so much of a training's state in an iteration, however fast or busy this machine is; or in truth.

The former is what the planner of a schedule that is learned is told; the real link is as fast as ever.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from checkflow.learning.messages import Request
from checkflow.learning.planner import Planner
from checkflow.runtime.device import Batch
from checkflow.runtime.host import HostDevice


def copies_take(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Batch], float]) -> None:
    """Each of the host's device, in its thread, so long at least."""
    copy = HostDevice._copy

    def slow(device: HostDevice, batch: Batch) -> None:
        time.sleep(seconds(batch))
        copy(device, batch)

    monkeypatch.setattr(HostDevice, "_copy", slow)
    monkeypatch.setattr(HostDevice, "inline_bytes", -1)


def asking(share: float) -> Callable[[Planner, Request], None]:
    """Planner.ask with a link that carries this share of the state in an iteration."""
    ask = Planner.ask

    def asked(planner: Planner, request: Request) -> None:
        state_bytes = sum(tensor.size_bytes for tensor in request.graph.tensors if tensor.views)
        bandwidth = round(share * state_bytes * 1e9 / request.graph.iteration_time_ns)
        ask(planner, dataclasses.replace(request, bandwidth_bytes_per_s=bandwidth))

    return asked
