"""What failures cost in the mean, in closed form: what `failures.run` tends to.

Exponential failures have no memory, so training renews itself at each restore, and of each life only its length counts
(renewal theory, as in Daly, "A higher order estimate of the optimum checkpoint interval", 2006). With rate p, a
checkpoint that is safe at time t of a life is kept with the probability e^(-p t) that the life is longer.

Taken for granted: no machine is lost while a killed trainer's newest checkpoint is still being written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1

from checkflow.errors import InputError
from checkflow.simulation.costs import Costs
from checkflow.simulation.incidents import Loss


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
    share = {Loss.TRAINER: 1 - machine_share, Loss.MACHINE: machine_share}
    work_ns = costs.interval * costs.iteration_ns
    kept = {Loss.TRAINER: _staged(costs, rate), Loss.MACHINE: _durable(costs, rate)}  # checkpoints of a life
    stall_ns = -expm1(-rate * costs.stall_ns) / rate * _each(costs, rate, work_ns)
    up_again_ns = _up_again_ns(costs, rate, machine_share)
    cycle_ns = mtbf_ns + up_again_ns
    useful_ns = sum(share[loss] * kept[loss] * work_ns for loss in Loss)
    return Expected(
        wasted=1 - useful_ns / cycle_ns,
        stall=stall_ns / cycle_ns,
        redone={loss: max(0.0, mtbf_ns - stall_ns - kept[loss] * work_ns) / costs.iteration_ns for loss in Loss},
    )


def _each(costs: Costs, rate: float, first_ns: float) -> float:
    """How many checkpoints of a life are expected, the first at `first_ns` and one each period."""
    return exp(-rate * first_ns) / -expm1(-rate * costs.period_ns)


def _staged(costs: Costs, rate: float) -> float:
    return _each(costs, rate, costs.interval * costs.iteration_ns + costs.staged_after_ns)


def _durable(costs: Costs, rate: float) -> float:
    """The number of the newest that is on disk: the first, and then one of so many, at the disk's pace."""
    first_ns = costs.interval * costs.iteration_ns + costs.staged_after_ns + costs.write_ns
    if _never_idle(costs):
        again = exp(-rate * costs.write_ns)
        of, late = costs.write_ns / costs.period_ns, 0.5  # when it is free the newest is half a period old, in the mean
    else:
        of, late = _of(costs), 0.0
        again = exp(-rate * of * costs.period_ns)
    return exp(-rate * first_ns) * (1 + (of / (1 - again) - late) * again)


def _never_idle(costs: Costs) -> bool:
    return costs.write_ns > max(costs.period_ns, costs.persist_gap_ns)


def _of(costs: Costs) -> int:
    """A disk that is idle at times writes one of so many checkpoints."""
    return max(1, -(-max(costs.persist_gap_ns, costs.write_ns) // costs.period_ns))


def _written_first(costs: Costs, rate: float) -> float:
    """How probable it is that a killed trainer's newest checkpoint has to be written before it is restored."""
    some = exp(-rate * (costs.interval * costs.iteration_ns + costs.staged_after_ns))
    if _never_idle(costs):
        return some
    return some * (1 - max(0, costs.period_ns - costs.write_ns) / (_of(costs) * costs.period_ns))


def _up_again_ns(costs: Costs, rate: float, machine_share: float) -> float:
    """From a failure until training goes on, with failures that come meanwhile and begin it anew."""
    from_memory_ns, from_disk_ns = costs.restore_memory_ns + costs.remake_ns, costs.restore_disk_ns + costs.remake_ns
    written = _written_first(costs, rate) * (1 - machine_share)
    downs = (
        (machine_share, costs.replace_ns + from_disk_ns),
        (written, max(costs.restart_ns, costs.write_ns) + from_memory_ns),
        (1 - machine_share - written, costs.restart_ns + from_memory_ns),
    )
    through = sum(share * exp(-rate * down_ns) for share, down_ns in downs)
    if through == 0:
        return float("inf")
    return sum(share * -expm1(-rate * down_ns) for share, down_ns in downs) / rate / through
