"""From a failure until training goes on, in the mean, with the failures that come meanwhile.

Each further failure begins the restart and the restore anew; a write that a killed trainer's saver is at goes on, until
a machine is lost. Failures have no memory: of rate p, and those that lose a machine of rate q.

Taken for granted: a disk that is never idle takes as many checkpoints further with each write.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf

import numpy as np
import numpy.typing as npt

from checkflow.simulation.costs import Costs
from checkflow.simulation.pace import DiskPace, pace_of

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_KINKS = 16  # checkpoints staged during a write, at which what is left jumps; more are too many to matter
_DECAYS = (1, 4, 12)  # mean times between failures: it is finer where most is
_OVER = 40  # mean times between failures after which none has come with the probability 4e-18

Floats = npt.NDArray[np.float64]


def before(rate: float, length_ns: float) -> float:
    """Mean ns until a failure of this rate, or until so much has passed: without a difference of what is alike."""
    return float(_before(rate, np.array(float(length_ns))))


@dataclass(frozen=True, slots=True)
class Down:
    """Means over failures that stop a training."""

    up_again_ns: float  # infinite where training practically never comes up
    lost_work_ns: float  # that a killed trainer had staged, and that a machine takes along before it is written


_NEVER = Down(inf, 0.0)


def down_of(costs: Costs, rate: float, machine_share: float) -> Down:
    """Of all losses together."""
    killed = 1 - machine_share
    disk_ns = costs.restore_disk_ns + costs.remake_ns
    lost_ns = 0.0  # of a lost machine
    if machine_share:
        # A trainer that is killed before a new machine has restored reads from the disk, too.
        downs = ((machine_share, costs.replace_ns + disk_ns), (killed, costs.restart_ns + disk_ns))
        through = sum(share * exp(-rate * down_ns) for share, down_ns in downs)
        if not through:
            return _NEVER
        again_ns = sum(share * before(rate, down_ns) for share, down_ns in downs) / through
        lost_ns = before(rate, costs.replace_ns + disk_ns) * (1 + rate * again_ns)
    if not killed:
        return Down(lost_ns, 0.0)
    memory_ns = costs.restart_ns + costs.restore_memory_ns + costs.remake_ns
    through = machine_share + killed * exp(-rate * memory_ns)
    if not through:
        return _NEVER
    loss_ns = machine_share * lost_ns
    # From a failure of which nothing is left to be written.
    kill_ns = before(rate, memory_ns) * (1 + rate * loss_ns) / through
    kill = _Kill(costs, rate, rate * machine_share, lost_ns, 1 / rate + loss_ns + killed * kill_ns)
    staged = exp(-rate * (costs.interval * costs.iteration_ns + costs.staged_after_ns))
    waited = kill.mean()
    return Down(
        loss_ns + killed * (kill_ns + staged * (waited.up_again_ns - kill_ns)), killed * staged * waited.lost_work_ns
    )


@dataclass(frozen=True, slots=True)
class _Kill:
    """Of a trainer that had staged checkpoints."""

    costs: Costs
    rate: float  # of failures, per ns
    machine_rate: float  # of those that lose the machine
    lost_ns: float  # until training is up from such a one
    failed_ns: float  # mean gap between failures, and from the next one until training is up where nothing is left

    def mean(self) -> Down:
        """Over when in a write it comes: all writes begin alike, so only the time since the last one began counts."""
        costs, pace = self.costs, pace_of(self.costs, self.rate)
        since_ns, shares = self._since(pace)
        left_ns = np.maximum(0.0, costs.write_ns - since_ns)
        # How many have been staged since, of which the newest is written, too.
        newer = since_ns[:, None] / costs.period_ns + np.array(pace.ages)
        newer, some = np.floor(newer).mean(axis=1), (newer >= 1).mean(axis=1)
        up_ns = (1 - some) * self._up_ns(left_ns) + some * self._up_ns(left_ns + costs.write_ns)
        # A machine that is lost before the write has ended takes its checkpoints, too: the first, or one of so many.
        written = 1 + exp(-self.rate * pace.every_ns) * (pace.of - 1)
        ends = np.exp(-self.machine_rate * left_ns)
        lost = (written + newer) * -np.expm1(-self.machine_rate * left_ns)
        lost += newer * ends * -expm1(-self.machine_rate * costs.write_ns)
        return Down(float(shares @ up_ns), float(shares @ lost) * costs.interval * costs.iteration_ns)

    def _since(self, pace: DiskPace) -> tuple[Floats, Floats]:
        """Times since the last write began, and how probable each is: a quadrature between kinks."""
        costs = self.costs
        newer = sorted({number - age for number in range(1, _KINKS + 1) for age in pace.ages})[:_KINKS]
        kinks = [costs.write_ns, costs.write_ns - costs.restart_ns, 2 * costs.write_ns - costs.restart_ns,
                 *(each * costs.period_ns for each in newer), *(each / self.rate for each in _DECAYS)]  # fmt: skip
        end_ns = min(float(pace.every_ns), _OVER / self.rate)
        cuts = np.unique([0.0, end_ns, *(float(kink) for kink in kinks if 0 < kink < end_ns)])
        halves = np.diff(cuts)[:, None] / 2
        since_ns = (cuts[:-1, None] + halves * (1 + _NODES)).ravel()
        shares = (halves * _WEIGHTS).ravel() * np.exp(-self.rate * since_ns)
        return since_ns, shares / shares.sum()

    def _up_ns(self, left_ns: Floats) -> Floats:
        """Until training is up, where so much is left to be written.

        First the write ends, or a machine is lost before. When it ends the restart has gone on since the last kill, t
        ago: e^(-p (restart + restore - t)) is the probability that nothing fails in the rest. Over t, with kills of
        rate p - q, that is e^(-p (restart + restore)) (1 + p (e^(q m) - 1) / q), m the lesser of restart and write.
        """
        costs, rate, lost_rate = self.costs, self.rate, self.machine_rate
        over_ns = np.minimum(left_ns, costs.restart_ns)
        memory_ns = costs.restart_ns + costs.restore_memory_ns + costs.remake_ns
        waits_ns = _before(lost_rate, left_ns)
        over = np.exp(-lost_rate * (left_ns - over_ns)) * _before(lost_rate, over_ns)
        through = exp(-rate * memory_ns)
        fails = np.exp(-lost_rate * left_ns) * -expm1(-rate * memory_ns) - through * rate * over
        up_ns: Floats = waits_ns * (1 + lost_rate * self.lost_ns) + self.failed_ns * fails
        return up_ns


def _before(rate: float, lengths_ns: Floats) -> Floats:
    found: Floats = -np.expm1(-rate * lengths_ns) / rate if rate else lengths_ns
    return found
