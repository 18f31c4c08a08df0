"""How much the timings may drift before a plan stalls: all of them together, and each at random.

Memory follows positions and not times, so the peak holds under any drift; what drift costs is a stall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.plan import PPM, TICKS_PER_BYTE, problem_of
from checkflow.schedule import Schedule
from checkflow.simulation.route import Route, route_of
from checkflow.simulation.simulate import Simulated, follow

SPREADS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
HEADINGS = ("drift", "iterations that stall", "mean stall", "median stall", "p99 stall", "longest stall")


class Noise(StrEnum):
    """How a random factor is distributed. Its mean is 1."""

    UNIFORM = "uniform"  # in [1 - x, 1 + x]
    LOGNORMAL = "lognormal"  # of standard deviation x


@dataclass(frozen=True, slots=True)
class Drifted:
    """What a drift costs. Stalls are shares of what the iteration takes without them; 0.01 is 1%."""

    drift: float
    iterations: int
    stalled: int  # iterations in which anything waited
    mean_stall: float
    median_stall: float
    p99_stall: float
    longest_stall: float

    @property
    def row(self) -> tuple[str, ...]:
        """For a table with HEADINGS."""
        shares = (self.mean_stall, self.median_stall, self.p99_stall, self.longest_stall)
        return (f"{self.drift:.0%}", f"{self.stalled / self.iterations:.1%}", *(f"{share:.2%}" for share in shares))


def tolerated_drift_ppm(schedule: Schedule, graph: Graph) -> int:
    """How much slower the link (or faster every operator) may be before training waits longer than certified, in ppm.

    Found by bisection: a slower link only ever ends each transfer later. Where both drift at once, each by d, the link
    is in effect 1 - (1 - d)² slower: slack 0.1 tolerates 0.19 of this.
    """
    route, _, times_ns = _nominal(schedule, graph)
    state_ticks = sum(row.bytes for row in schedule.actions) * TICKS_PER_BYTE
    period_ns = sum(times_ns) * schedule.period + schedule.certificate.pause_ns

    def unstalled(drift_ppm: int) -> bool:
        bandwidth = schedule.bandwidth_bytes_per_s * (PPM - drift_ppm) // PPM
        if bandwidth < 1 or state_ticks > period_ns * bandwidth:
            return False
        allowed_ticks = schedule.certificate.pause_ns * bandwidth
        played = follow(route, [times_ns] * route.settled, bandwidth)
        return all(iteration.stalled_ticks <= allowed_ticks for iteration in played.iterations)

    low, high = 0, PPM
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if unstalled(middle) else (low, middle)
    return low


def under_uniform_drift(
    schedule: Schedule, graph: Graph, drifts: Sequence[float] = SPREADS, *, iterations: int = 50
) -> tuple[Drifted, ...]:
    """Every timing drifts to the bad side: operators take 1 - x of their time, and the link carries 1 - x of its bytes.

    Raises InputError for a drift outside of [0, 1).
    """
    route, bandwidth, times_ns = _nominal(schedule, graph)

    def one(drift: float) -> Drifted:
        if not 0 <= drift < 1:
            raise InputError(f"drift: {drift} is not in [0, 1); 0.1 is 10%")
        left_ppm = PPM - round(drift * PPM)
        times = [time * left_ppm // PPM for time in times_ns]
        slower = max(1, bandwidth * left_ppm // PPM)
        return _drifted(drift, follow(route, [times] * (route.settled + iterations), slower), route)

    return tuple(map(one, drifts))


def under_random_drift(
    schedule: Schedule,
    graph: Graph,
    drifts: Sequence[float] = SPREADS,
    *,
    noise: Noise = Noise.UNIFORM,
    link: bool = True,
    iterations: int = 200,
    seed: int = 0,
) -> tuple[Drifted, ...]:
    """Each operator's time is multiplied by a factor of its own, anew in each iteration.

    Args:
        drifts: x of the distribution, one result for each; the same draws are scaled for all of them.
        link: what the link takes for a byte is multiplied by a factor too, one for each iteration.
        iterations: drawn and counted, after those that fill the link's queue.

    Raises InputError for an x at which times would be negative.
    """
    route, bandwidth, times_ns = _nominal(schedule, graph)
    generator = np.random.default_rng(seed)
    shape = route.settled + iterations, len(times_ns) + 1
    uniform = noise is Noise.UNIFORM
    draws = generator.uniform(-1, 1, shape) if uniform else generator.standard_normal(shape)
    scaled: Callable[[float], npt.NDArray[np.float64]] = (
        (lambda x: 1 + x * draws)
        if uniform
        else (lambda x: np.exp(draws * np.log1p(x * x) ** 0.5 - np.log1p(x * x) / 2))
    )

    def one(drift: float) -> Drifted:
        if drift < 0 or (uniform and drift > 1):
            raise InputError(f"drift: {drift} is not in [0, 1]; 0.1 is 10%")
        factors = scaled(drift)
        times = np.rint(factors[:, :-1] * np.array(times_ns)).astype(np.int64).tolist()
        per_byte = np.maximum(1, np.rint(factors[:, -1] * TICKS_PER_BYTE)).astype(np.int64).tolist() if link else None
        return _drifted(drift, follow(route, times, bandwidth, per_byte), route)

    return tuple(map(one, drifts))


def tolerated(results: Sequence[Drifted]) -> float:
    """The largest of the drifts up to which no iteration stalled; 0.0 where the smallest stalls."""
    largest = 0.0
    for result in sorted(results, key=lambda result: result.drift):
        if result.stalled:
            break
        largest = result.drift
    return largest


def _nominal(schedule: Schedule, graph: Graph) -> tuple[Route, int, tuple[int, ...]]:
    """The route, the link's bandwidth and the operators' times, without slack or drift."""
    problem = problem_of(graph, bandwidth_bytes_per_s=schedule.bandwidth_bytes_per_s, interval=schedule.period)
    return route_of(schedule, problem), problem.bandwidth_bytes_per_s, problem.time_ns


def _drifted(drift: float, simulated: Simulated, route: Route) -> Drifted:
    counted = simulated.iterations[route.settled :]
    shares = [i.stalled_ticks / max(1, i.time_ticks - i.stalled_ticks) for i in counted]
    return Drifted(
        drift=drift,
        iterations=len(shares),
        stalled=sum(share > 0 for share in shares),
        mean_stall=fmean(shares),
        median_stall=median(shares),
        p99_stall=float(np.quantile(shares, 0.99)),
        longest_stall=max(shares),
    )
