"""The planner's process: one Request on its standard input, its Answer on its standard output.

It is started before there is anything to plan, so that what takes long to import is there by then.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from pathlib import Path

from checkflow.compiler import Options, Refused, compile_graph
from checkflow.errors import CheckflowError
from checkflow.graph import Graph
from checkflow.graphfile import write_graph
from checkflow.learning.messages import Answer, Planned, Request, Unplanned
from checkflow.schedule import Schedule, write_schedule


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the trainer ends this one
    with contextlib.suppress(OSError):
        os.nice(10)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed is no answer
    try:
        request = pickle.load(sys.stdin.buffer)
    except EOFError:  # the trainer has ended
        return
    answer = answer_to(request)
    with contextlib.suppress(BrokenPipeError):
        with answers:
            pickle.dump(answer, answers)
        if isinstance(answer, Planned) and request.keep_as is not None:
            _keep(request.keep_as, request.graph, answer.schedule)


def answer_to(request: Request) -> Answer:
    """A schedule that `verify` accepts, or why there is none."""
    options = Options(bandwidth_bytes_per_s=request.bandwidth_bytes_per_s, interval=request.interval)
    try:
        result = compile_graph(request.graph, options)
    except CheckflowError as error:
        return Unplanned(str(error))
    if isinstance(result, Refused):
        return Unplanned(result.answer.detail)
    return Planned(result.schedule, result.plan_s)


def _keep(path: Path, graph: Graph, schedule: Schedule) -> None:
    """For the next start, which learns anew where this fails."""
    with contextlib.suppress(CheckflowError, OSError):
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():  # as of the store's own files, none is reached through a link
            return
        write_graph(path.with_suffix(".graph.json"), graph)
        write_schedule(path.with_suffix(".schedule.json"), schedule)


if __name__ == "__main__":
    main()
