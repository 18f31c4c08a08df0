"""Replays a plan or a schedule against the model it claims (docs/model.md), independently of whatever found it.

Everything is recomputed here in exact integers: windows, slack, coverage, link times, peaks and the bound. Link times
are in ticks of 1e-9 byte; steps and positions are unrolled around the checkpoint. No function of the planner runs here.
"""

from checkflow.verify.plan import VerifiedPlan, verify_plan
from checkflow.verify.schedule import VerifiedSchedule, verify

__all__ = ["VerifiedPlan", "VerifiedSchedule", "verify", "verify_plan"]
