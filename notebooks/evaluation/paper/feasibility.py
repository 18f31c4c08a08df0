"""Table I of the paper: which links carry a checkpoint of every iteration, and the iteration times that decide it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from checkflow.plan import Formulation
from checkflow.report import style
from checkflow.sweep import Row
from evaluation.paper.peaks import name_of
from evaluation.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BANDWIDTHS = (63_000_000_000, 40_000_000_000, 20_000_000_000)  # bytes per second, Table I's columns
Marks = tuple[bool | None, ...]  # one for each bandwidth; None: not known
TABLE_I: Mapping[tuple[str, int], Marks] = {
    ("alexnet", 32): (True, False, False),
    ("alexnet", 1024): (True, True, True),
    ("bert", 32): (True, True, True),
}
HEADINGS = ("network / batch", "profile", "the paper", "its formulation", "ours", "iteration ms")
NEVER, ALWAYS = "#f3d9cb", "#cfe8df"  # grounds for marks
SHORTEST_MS, LONGEST_MS = 2.5, 400.0  # of the strips
_SHADES = (NEVER, "#f7f0d8", "#e2eed8", ALWAYS)  # by how many of three bandwidths suffice


@dataclass(frozen=True, slots=True)
class Workload:
    """One network at one batch size, with the time that each profile gives to its iteration."""

    name: str
    state_bytes: int
    iteration_ns: Mapping[str, int]  # by profile
    marks: Marks  # the paper's

    def threshold_ns(self, bandwidth_bytes_per_s: int) -> float:
        """The shortest iteration in which a link carries the state."""
        return self.state_bytes * 1e9 / bandwidth_bytes_per_s

    def band_ns(self) -> tuple[float, float]:
        """The iteration times in which the paper's marks come out, if nothing but the link decides: [low, high)."""
        thresholds = [(self.threshold_ns(rate), mark) for rate, mark in zip(BANDWIDTHS, self.marks, strict=True)]
        low = max((limit for limit, mark in thresholds if mark), default=0.0)
        return low, min((limit for limit, mark in thresholds if mark is False), default=float("inf"))


def text_of(marks: Marks) -> str:
    """Like ✓✗✗."""
    return " ".join({True: "✓", False: "✗", None: "?"}[mark] for mark in marks)


def table(rows: Sequence[Row]) -> Table:
    """The paper's marks and those of both formulations for each profile; rows at all of BANDWIDTHS."""
    found = {(*name_of(row), row.device, row.cell.formulation, row.bandwidth_bytes_per_s): row.feasible for row in rows}
    times = {(*name_of(row), row.device or ""): row.iteration_time_ns or 0 for row in rows}
    lines = (
        (
            f"{network} / {batch}",
            device,
            text_of(TABLE_I[network, batch]),
            *(
                text_of(tuple(found[network, batch, device, formulation, rate] for rate in BANDWIDTHS))
                for formulation in (Formulation.COMPACT, Formulation.DIRECT)
            ),
            f"{time_ns / 1e6:.2f}",
        )
        for (network, batch, device), time_ns in times.items()
    )
    return Table(HEADINGS, tuple(lines), left=5)


def agreeing(rows: Iterable[Row]) -> int:
    """How many rows are feasible where the paper's cell is, and not where it is not."""
    return sum(row.feasible is TABLE_I[name_of(row)][BANDWIDTHS.index(row.bandwidth_bytes_per_s or 0)] for row in rows)


def workloads(rows: Iterable[Row]) -> tuple[Workload, ...]:
    """From rows that name every workload of Table I, or a variant of one ("bert, 4 tokens"), and every profile."""
    sizes: dict[tuple[str, int], int] = {}
    times: dict[tuple[str, int], dict[str, int]] = {}
    for row in rows:
        sizes[name_of(row)] = row.state_bytes or 0
        times.setdefault(name_of(row), {})[row.device or ""] = row.iteration_time_ns or 0
    return tuple(
        Workload(f"{network} / {batch}", size_bytes, times[network, batch], TABLE_I[network.partition(",")[0], batch])
        for (network, batch), size_bytes in sizes.items()
    )


@style.styled()
def draw_bands(loads: Sequence[Workload]) -> Figure:
    """For each workload a strip of iteration times: which links suffice, where the paper's marks lie, our profiles."""
    figure = style.new_figure(1.3 + 1.25 * len(loads))
    for axes, load in zip(figure.subplots(len(loads), 1, sharex=True, squeeze=False)[:, 0], loads, strict=True):
        _strip(axes, load)
    axes.set_xlabel("iteration time (ms)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55), ncols=4)
    rates = ", ".join(f"{rate / 1e9:.0f}" for rate in BANDWIDTHS)
    figure.suptitle(f"Which links carry a checkpoint of every iteration: ✓ or ✗ at {rates} GB/s", x=0.01, ha="left")
    return figure


def _strip(axes: Axes, load: Workload) -> None:
    from matplotlib.patches import Rectangle

    limits_ms = [load.threshold_ns(rate) / 1e6 for rate in BANDWIDTHS]
    edges = [SHORTEST_MS, *limits_ms, LONGEST_MS]
    for number, (left, right) in enumerate(pairwise(edges)):
        axes.axvspan(left, right, color=_SHADES[number], linewidth=0)
        marks = text_of(tuple(place < number for place in range(len(BANDWIDTHS))))
        axes.annotate(marks, (left, 0.84), (6, 0), textcoords="offset points", va="center", size=11)
    for limit_ms in limits_ms:
        axes.axvline(limit_ms, color=style.FAINT, linewidth=0.8)
        axes.annotate(f"{limit_ms:.1f}", (limit_ms, 0), (2, 2), textcoords="offset points", size=9, color=style.FAINT)
    low_ms, high_ms = (max(SHORTEST_MS, min(edge / 1e6, LONGEST_MS)) for edge in load.band_ns())
    axes.add_patch(
        Rectangle((low_ms, 0.02), high_ms - low_ms, 0.96, fill=False, edgecolor=style.INK, linewidth=2.2,
                  label="the paper's marks")
    )  # fmt: skip
    for place, (name, time_ns) in enumerate(load.iteration_ns.items()):
        axes.plot(time_ns / 1e6, 0.58 - 0.2 * place, "o", color=style.CYCLE[place], markersize=9, label=name,
                  markeredgecolor="white")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(SHORTEST_MS, LONGEST_MS)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_title(f"{load.name}: {load.state_bytes / 1e6:.0f} MB of state", fontsize=11)
    axes.xaxis.set_major_formatter("{x:g}")
