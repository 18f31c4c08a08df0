"""A link that carries so much of a training's state in an iteration, however fast or busy this machine is.

It is what the planner of a schedule that is learned is told; the real link is as fast as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from checkflow.learning.messages import Request
from checkflow.learning.planner import Planner


def asking(share: float) -> Callable[[Planner, Request], None]:
    """Planner.ask with a link that carries this share of the state in an iteration."""
    ask = Planner.ask

    def asked(planner: Planner, request: Request) -> None:
        state_bytes = sum(tensor.size_bytes for tensor in request.graph.tensors if tensor.views)
        bandwidth = round(share * state_bytes * 1e9 / request.graph.iteration_time_ns)
        ask(planner, dataclasses.replace(request, bandwidth_bytes_per_s=bandwidth))

    return asked
