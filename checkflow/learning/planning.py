"""What the planner's process does with a Request."""

from __future__ import annotations

import contextlib
from pathlib import Path

from checkflow.compiler import Options, Refused, compile_graph
from checkflow.errors import CheckflowError, internal
from checkflow.graph import Graph
from checkflow.graphfile import write_graph
from checkflow.learning.messages import Answer, Planned, Request, Unplanned
from checkflow.schedule import Schedule, write_schedule


def answer_to(request: Request) -> Answer:
    """A schedule that `verify` accepts, or why there is none."""
    options = Options(
        request.bandwidth_bytes_per_s, interval=request.interval, policy=request.policy, factors=request.factors
    )
    try:
        result = compile_graph(request.graph, options)
    except CheckflowError as error:
        return Unplanned(str(error))
    except Exception as error:  # noqa: BLE001 (who trains hears what it was, not that a process has ended)
        return Unplanned(internal(error))
    if isinstance(result, Refused):
        return Unplanned(result.answer.detail)
    return Planned(result.schedule, result.plan_s)


def keep(path: Path, graph: Graph, schedule: Schedule) -> None:
    """For the next start, which learns anew where this fails."""
    with contextlib.suppress(CheckflowError, OSError):
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():  # as of the store's own files, none is reached through a link
            return
        kept = path.with_suffix(".graph.json"), path.with_suffix(".schedule.json")
        for each in kept:
            if each.is_symlink():
                each.unlink()
        write_graph(kept[0], graph)
        write_schedule(kept[1], schedule)
