"""What failures cost in the mean, in closed form: what `failures.run` tends to.

Exponential failures have no memory, so training renews itself at each restore, and of each life only its length counts
(renewal theory, as in Daly, "A higher order estimate of the optimum checkpoint interval", 2006). With rate p, a
checkpoint that is safe at time t of a life is kept with the probability e^(-p t) that the life is longer.

Every loss is computed by itself, never as what is left of nearly all: a mean time between failures may be any.

Only what a kill during a write costs is added up over when it comes (downs.py).

Taken for granted: that a machine is lost while a killed trainer's newest checkpoint is still being written is in
`wasted`, and not in `redone`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, isinf

from checkflow.errors import InputError
from checkflow.simulation.costs import Costs
from checkflow.simulation.downs import before, down_of
from checkflow.simulation.incidents import Loss
from checkflow.simulation.pace import pace_of


@dataclass(frozen=True, slots=True)
class Expected:
    """Means over many failures."""

    wasted: float  # share of the time in which training does not get ahead
    stall: float  # share of the time in which it waits for checkpoints
    redone: dict[Loss, float]  # iterations that a failure of its class has done again, with the one that ran


def expected(costs: Costs, mtbf_ns: float, machine_share: float) -> Expected:
    """The costs of a policy without deltas.

    Args:
        costs: of the policy.
        mtbf_ns: mean time between failures, of all devices together.
        machine_share: of the failures, those that take host memory along; the others kill a trainer.

    Raises InputError for a policy with deltas: only `failures.run` counts those.
    """
    if costs.base_every > 1:
        raise InputError(f"{costs.name}: has deltas, for which there is no closed form; simulate it")
    rate = 1 / mtbf_ns
    lost = {Loss.TRAINER: 1 - machine_share, Loss.MACHINE: machine_share}
    work_ns = costs.interval * costs.iteration_ns
    lives = _Lives(costs, rate)
    stall_ns = before(rate, costs.stall_ns) * exp(-rate * work_ns) * lives.periods
    kept = {Loss.TRAINER: lives.staged, Loss.MACHINE: lives.durable}
    redo_ns = {Loss.TRAINER: lives.unstaged_ns, Loss.MACHINE: lives.unstaged_ns + lives.behind * work_ns}
    redone = {loss: redo_ns[loss] / costs.iteration_ns for loss in Loss}
    down = down_of(costs, rate, machine_share)
    if isinf(down.up_again_ns):
        return Expected(wasted=1.0, stall=0.0, redone=redone)
    wasted_ns = down.up_again_ns + stall_ns + sum(share * redo_ns[loss] for loss, share in lost.items())
    useful_ns = sum(share * kept[loss] * work_ns for loss, share in lost.items())
    wasted_ns, useful_ns = wasted_ns + down.lost_work_ns, max(0.0, useful_ns - down.lost_work_ns)
    return Expected(wasted=wasted_ns / (wasted_ns + useful_ns), stall=stall_ns / (wasted_ns + useful_ns), redone=redone)


class _Lives:
    """Means over lives: checkpoints that one leaves, and what it loses."""

    def __init__(self, costs: Costs, rate: float) -> None:
        work_ns = costs.interval * costs.iteration_ns
        first_ns = work_ns + costs.staged_after_ns
        period, write = rate * costs.period_ns, rate * costs.write_ns
        # The disk writes the first checkpoint, and then one of so many, at its pace.
        pace = pace_of(costs, rate)
        of, age = pace.of, sum(pace.ages) / len(pace.ages)
        paces = -1 / expm1(-of * period)
        self.periods = -1 / expm1(-period)
        self.staged = exp(-rate * first_ns) * self.periods
        self.durable = exp(-rate * first_ns - write) * (1 + of * paces * exp(-of * period) - age)
        # Since the last iteration of a checkpoint that was begun, and of those that were not staged yet.
        begun_ns = work_ns * _since(rate * work_ns)
        self.unstaged_ns = self.periods * (
            begun_ns - work_ns * exp(-rate * work_ns) * expm1(-rate * costs.staged_after_ns)
        )
        # How many the newest on disk is behind the newest staged one.
        gaps = of * _above(of * period) - _above(period)
        self.behind = exp(-rate * first_ns) * (-of * paces * expm1(-write) + exp(-write) * (of - 1 + age) - gaps)


def _since(x: float) -> float:
    """(1 - (1 + x) / e^x) / x: how much of a time of x means has passed when a failure comes in it, if one does."""
    if x > 0.5:
        return (1 - (1 + x) * exp(-x)) / x
    term, total = x, 0.0
    for number in range(20):
        total += term / (number + 2)
        term *= -x / (number + 1)
    return total


def _above(x: float) -> float:
    """1 / (1 - e^-x) - 1 / x: from 1/2 to 1."""
    if x > 0.02:
        return -1 / expm1(-x) - 1 / x
    return 0.5 + x / 12 - x**3 / 720
