"""Every policy on one training: what each wastes as failures become more frequent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from checkflow.choice import Comparison, Surroundings, choose
from checkflow.compiler import Compiled, Options, Refused, compile_graph
from checkflow.graph import Graph
from checkflow.hardware import Profile, copy_ns, link_bytes_per_s
from checkflow.report import waste
from checkflow.simulation.failures import run, spread
from checkflow.simulation.incidents import exponential
from evaluation.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOUR_NS = 3600 * 10**9
FAILURES, SEEDS = 500, 6  # of each run


@dataclass(frozen=True, slots=True)
class Point:
    """What was compared at one mean time between failures."""

    mtbf_h: float
    comparison: Comparison


def compared(graph: Graph, profile: Profile, hours: Sequence[float]) -> list[Point]:
    """Every policy at the intervals that `--policy auto` looks at."""
    options = Options(link_bytes_per_s(profile), interval=None)

    @cache
    def compiled(asked: Options) -> Compiled | Refused:
        return compile_graph(graph, asked)

    return [
        Point(
            each,
            choose(
                graph, options, Surroundings(round(each * HOUR_NS)), lambda size: copy_ns(size, profile),
                compiling=lambda _graph, asked, _progress: compiled(asked),
            ),
        )
        for each in hours
    ]  # fmt: skip


def draw(points: Sequence[Point], title: str) -> Figure:
    """Simulated, at each policy's best interval for the mean time between failures."""
    lines: dict[str, list[waste.Point]] = {}
    for point in points:
        best = {}
        for option in sorted(point.comparison.options, key=lambda one: -one.expected.wasted):
            best[option.policy] = option
        for policy, option in sorted(best.items()):
            mtbf_ns = point.mtbf_h * HOUR_NS
            runs = [run(option.costs, exponential(mtbf_ns, 0.5, seed), round(mtbf_ns * FAILURES))
                    for seed in range(SEEDS)]  # fmt: skip
            found = spread(outcome.wasted for outcome in runs)
            lines.setdefault(policy, []).append(waste.Point(point.mtbf_h * 3600, found))
    return waste.draw(lines, title)


def table(points: Sequence[Point]) -> Table:
    """What is chosen."""
    rows = []
    for point in points:
        option = point.comparison.options[0]
        rows.append(
            (f"{point.mtbf_h:g} h", option.policy, str(option.interval), f"{option.expected.wasted:.2%}",
             f"{option.added_bytes / 2**20:.0f} MiB")
        )  # fmt: skip
    return Table(("a failure each", "chosen", "every", "wasted", "device memory"), tuple(rows), left=2)
