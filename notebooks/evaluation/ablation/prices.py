"""What slack costs in peak memory, and how much drift it buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graph import Graph
from checkflow.plan import PPM, Reason
from checkflow.schedule import Certificate
from checkflow.simulation.drift import SPREADS, Noise, tolerated, tolerated_drift_ppm, under_random_drift
from checkflow.units import format_bytes

SLACKS = (0.0, 0.05, 0.1, 0.2, 0.3)
HEADINGS = (
    "slack", "interval", "planned peak", "executed peak", "added to training", "snapshots", "link may be slower by",
    "unstalled at random up to",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlackPrice:
    """A plan with slack. Without a certificate there is none, and `reason` says why."""

    slack: float
    interval: int
    reason: Reason | None
    certificate: Certificate | None  # peaks and snapshots
    tolerated_drift: float  # of the link alone
    tolerated_random_drift: float  # of every timing, the largest of the grid without a stall

    @property
    def row(self) -> tuple[str, ...]:
        """For a table with HEADINGS."""
        found = self.certificate
        if found is None:
            return (f"{self.slack:.0%}", str(self.interval), f"none: {self.reason}", *[""] * (len(HEADINGS) - 3))
        return (
            f"{self.slack:.0%}",
            str(self.interval),
            format_bytes(found.peak_bytes),
            format_bytes(found.peak_bytes),
            format_bytes(found.peak_bytes - found.training_peak_bytes),
            format_bytes(found.snapshot_bytes),
            f"{self.tolerated_drift:.1%}",
            f"{self.tolerated_random_drift:.0%}",
        )


def price_of_slack(
    graph: Graph,
    options: Options,
    slacks: Sequence[float] = SLACKS,
    *,
    noise: Noise = Noise.UNIFORM,
    spreads: Sequence[float] = SPREADS,
    iterations: int = 200,
    seed: int = 0,
) -> tuple[SlackPrice, ...]:
    """Compile with each slack, otherwise as `options` say. Raises what compile_graph and under_random_drift raise."""

    def one(slack: float) -> SlackPrice:
        made = compile_graph(graph, replace(options, slack_ppm=round(slack * PPM)))
        if not isinstance(made, Compiled):
            return SlackPrice(slack, made.problem.interval, made.answer.reason, None, 0.0, 0.0)
        drifted = under_random_drift(made.schedule, graph, spreads, noise=noise, iterations=iterations, seed=seed)
        return SlackPrice(
            slack=slack,
            interval=made.schedule.interval,
            reason=None,
            certificate=made.schedule.certificate,
            tolerated_drift=tolerated_drift_ppm(made.schedule, graph) / PPM,
            tolerated_random_drift=tolerated(drifted),
        )

    return tuple(map(one, slacks))
