"""A schedule against what its policy does: which ones there are, and what each may have beside a plan of the whole.

Stated here a second time, from docs/model.md: "Policies that pause" and "Several iterations for one checkpoint".
"""

from __future__ import annotations

from checkflow.schedule import Schedule
from checkflow.verify.failure import fail

PAUSE, PARTS, LANES, REPLICA = "a pause", "parts of several iterations", "lanes", "a replica"

# None but those of its own; where a policy finds nothing to do in its way it has a plan of the whole, as any.
HAS: dict[str, str] = {
    "checkflow": "",
    "synchronous": PAUSE,
    "checkfreq_cpu": PAUSE,
    "checkfreq": PAUSE,
    "gockpt": PARTS,
    "rolling": LANES,
    "lowdiff": LANES,
    "lowdiff_plus": REPLICA,
}


def check_policy(schedule: Schedule) -> None:
    """Raises VerificationError for a policy that there is not, or one that does nothing of the kind."""
    policy, parts = schedule.policy, bool(schedule.gradients) or any(row.back for row in schedule.actions)
    if policy not in HAS:
        fail(f"policy: there is no {policy!r}; those there are: {', '.join(sorted(HAS))}")
    for what, is_there in (
        (PAUSE, schedule.pause is not None),
        (LANES, schedule.lanes > 1),
        (REPLICA, schedule.replica),
        (PARTS, parts and schedule.lanes == 1 and not schedule.replica),
    ):
        if is_there and HAS[policy] != what:
            fail(f"policy: the schedule has {what}, and {policy!r} has none")
    found = schedule.formulation, schedule.transfers
    if policy != "checkflow" and found != ("direct", "streaming"):
        fail(f"policy: {policy!r} is always direct and streaming, not {found[0]} and {found[1]}")
    if schedule.lanes > 1 and schedule.interval > 1:
        fail(f"lanes: {schedule.lanes} go with an interval of 1, not {schedule.interval}")
    if schedule.replica and not schedule.gradients:
        fail("replica: there is no gradient by which the host would bring it on")
