"""What simulated failures cost, as a table, as JSON and as lines of a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from rich.text import Text

from checkflow.report.columns import Column, Columns
from checkflow.report.waste import Point
from checkflow.simulation.costs import Costs
from checkflow.simulation.failures import Spread, Trial, spread
from checkflow.simulation.incidents import Loss
from checkflow.units import format_bytes

DAY_NS = 86_400 * 10**9


@dataclass(frozen=True, slots=True)
class Trials:
    """A policy against one rate of failures, in several runs."""

    costs: Costs
    devices: int
    mtbf_ns: int | None  # of one device; None: the failures are those of a file
    runs: tuple[Trial, ...]

    @property
    def effective(self) -> Spread:
        return spread(outcome.effective for outcome in self.runs)

    @property
    def wasted(self) -> Spread:
        return spread(outcome.wasted for outcome in self.runs)

    def share(self, cause: str) -> float:
        """Of the time, the median of the runs."""
        return median(float(getattr(outcome.spent, f"{cause}_ns")) / outcome.span_ns for outcome in self.runs)

    def redone(self, loss: Loss) -> float:
        """Iterations for each such failure, of all runs together."""
        failures = sum(outcome.failures[loss] for outcome in self.runs)
        return sum(outcome.redone[loss] for outcome in self.runs) / failures if failures else 0.0

    def disk_bytes_per_day(self) -> int:
        return round(median(outcome.disk_bytes * DAY_NS / outcome.span_ns for outcome in self.runs))


CAUSES = ("stall", "redo", "restart", "restore", "replay")


def table_of(cells: list[Trials]) -> Columns:
    """A line for each policy, under each rate of failures."""
    first = [
        before is None or (before.mtbf_ns, before.devices) != (cell.mtbf_ns, cell.devices)
        for before, cell in pairwise([None, *cells])
        if cell is not None
    ]
    several = len(cells[0].runs) > 1

    def column(name: str, texts: Iterable[str], *, right: bool = True) -> Column:
        return Column(name, tuple(map(Text, texts)), right=right)

    def where_new(texts: Iterable[str]) -> list[str]:
        return [text if new else "" for text, new in zip(texts, first, strict=True)]

    left = (
        column("a failure each", where_new(map(_each, cells)), right=False),
        column("policy", (cell.costs.name for cell in cells), right=False),
    )
    effective = [cell.effective for cell in cells]
    return Columns(
        left,
        (
            column("devices", where_new(str(cell.devices) for cell in cells)),
            column("effective", (f"{each.median:.2%}" for each in effective)),
            column("95% of medians", (f"{each.low:.2%} to {each.high:.2%}" if several else "" for each in effective)),
            *(column(cause, (f"{cell.share(cause):.2%}" for cell in cells)) for cause in CAUSES),
            column("redone by a kill", (f"{cell.redone(Loss.TRAINER):.1f}" for cell in cells)),
            column("by a lost machine", (f"{cell.redone(Loss.MACHINE):.1f}" for cell in cells)),
            column("to disk a day", (format_bytes(cell.disk_bytes_per_day()) for cell in cells)),
        ),
    )


def _each(cell: Trials) -> str:
    if cell.mtbf_ns is None:
        return f"{sum(cell.runs[0].failures.values())} in the file"
    seconds = cell.mtbf_ns / cell.devices / 1e9
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.{0 if seconds >= 100 * size else 1}f} {unit}"
    return f"{seconds:.1f} s"


def document_of(cell: Trials) -> dict[str, object]:
    """Medians of the runs, sums of their failures, and what was simulated."""
    return {
        "policy": cell.costs.name,
        "devices": cell.devices,
        "mtbf_s": None if cell.mtbf_ns is None else cell.mtbf_ns / 1e9,
        "runs": len(cell.runs),
        "span_s": median(outcome.span_ns for outcome in cell.runs) / 1e9,
        "failures": {loss.value: sum(outcome.failures[loss] for outcome in cell.runs) for loss in Loss},
        "effective": asdict(cell.effective),
        "wasted": asdict(cell.wasted),
        "shares": {cause: cell.share(cause) for cause in CAUSES},
        "redone_per_failure": {loss.value: cell.redone(loss) for loss in Loss},
        "link_bytes": median(outcome.link_bytes for outcome in cell.runs),
        "disk_bytes": median(outcome.disk_bytes for outcome in cell.runs),
        "disk_bytes_per_day": cell.disk_bytes_per_day(),
        "costs": asdict(cell.costs),
    }


def lines_of(cells: list[Trials]) -> dict[str, list[Point]]:
    """Of those with a mean time between failures."""
    lines: dict[str, list[Point]] = {}
    for cell in cells:
        if cell.mtbf_ns is not None:
            lines.setdefault(cell.costs.name, []).append(Point(cell.mtbf_ns / cell.devices / 1e9, cell.wasted))
    return lines
