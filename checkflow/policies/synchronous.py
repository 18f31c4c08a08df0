"""Training stands still at the iteration's end until the whole state is on the host.

Figure 4b of CheckFreq (FAST '21, section 4.3.1): the snapshot in host memory is taken while training waits, and written
to disk behind its back. In its favour, the copy has the link's full bandwidth, the disk is never waited for, and state
that the iteration never writes is not in a Problem, and so not copied again with each checkpoint.
"""

from __future__ import annotations

from checkflow.plan import TICKS_PER_BYTE, Infeasible, Problem
from checkflow.policies.planned import Planned, direct, duration_ns, paused, read_after_iteration, within_limit


def plan(problem: Problem) -> Planned | Infeasible:
    """A pause of S/B at the end of the last of k iterations, and no byte of memory.

    Infeasible where the memory limit is below what training alone needs.
    """
    pause_ns = duration_ns(problem.state_bytes * TICKS_PER_BYTE, problem)
    runs = paused(read_after_iteration(problem), pause_ns, problem.interval * problem.steps)
    sent = direct(runs, begin=-1)  # the pause is the iteration's last step
    return within_limit(Planned(runs, sent, sent.peak_bytes, pause_ns), problem, None)
