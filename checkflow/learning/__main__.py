"""The planner's process: one Request on its standard input, its Answer on its standard output.

It is started before there is anything to plan, so that what takes long to import is there by then.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys

from checkflow.background import give_way
from checkflow.collector import lasting_imports, process_ends


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the trainer ends this one
    give_way()
    with lasting_imports():  # this takes a while, so others go first from here on
        from checkflow.learning.messages import Planned
        from checkflow.learning.planning import answer_to, keep

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
            keep(request.keep_as, request.graph, answer.schedule)


if __name__ == "__main__":
    main()
    process_ends()
