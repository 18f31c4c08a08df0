"""The chunk limit in Eq 9: a chunk has to leave within one operator, so large chunks leave much of the link unused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from checkflow.graph import Graph
from checkflow.plan import Formulation, Plan, problem_of
from checkflow.plan.packed.packing import Unpacked, pack
from checkflow.plan.packed.steps import whole_chunks
from checkflow.report import style
from evaluation.paper.feasibility import ALWAYS, BANDWIDTHS, NEVER, TABLE_I, Marks, text_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES = tuple(2**power for power in range(18, 27))  # bytes, 256 KiB to 64 MiB
Verdicts = Mapping[tuple[str, int], Sequence[Marks]]  # of each of Table I's workloads, for each of SIZES


def verdicts(graph: Graph) -> tuple[Marks, ...]:
    """Whether the paper's formulation has a plan with chunks of exactly each of SIZES, never split further.

    True was planned, False is proven; None where a plan was neither constructed nor excluded.
    """
    return tuple(tuple(_packs(graph, rate, size) for rate in BANDWIDTHS) for size in SIZES)


def _packs(graph: Graph, bandwidth_bytes_per_s: int, chunk_bytes: int) -> bool | None:
    problem = problem_of(graph, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    answer = pack(problem, whole_chunks(problem, chunk_bytes), Formulation.COMPACT, 0, time_limit_s=0.0)
    return True if isinstance(answer, Plan) else False if answer is Unpacked.IMPOSSIBLE else None


def as_in_table_i(found: Verdicts) -> tuple[int, ...]:
    """The chunk sizes, in bytes, at which all nine marks are the paper's."""
    return tuple(size for at, size in enumerate(SIZES) if all(found[name][at] == TABLE_I[name] for name in TABLE_I))


@style.styled()
def draw(by_profile: Mapping[str, Verdicts]) -> Figure:
    """A panel for each profile: Table I's cells against the chunk size. A frame: all nine as in the paper."""
    figure = style.new_figure(4.9)
    panels = figure.subplots(1, len(by_profile), sharey=True, squeeze=False)[0]
    for axes, (profile, found) in zip(panels, by_profile.items(), strict=True):
        _panel(axes, found)
        axes.set_title(profile)
    labels = [f"{network} / {batch}   {rate / 1e9:.0f} GB/s" for network, batch in TABLE_I for rate in BANDWIDTHS]
    panels[0].set_yticks(range(len(labels)), labels)
    figure.supxlabel("size of a chunk (MiB)", size=11)
    figure.suptitle("Table I by the size of a chunk; framed: all nine marks are the paper's", x=0.01, ha="left")
    return figure


def _panel(axes: Axes, found: Verdicts) -> None:
    from matplotlib.patches import Rectangle

    marks = [[found[name][at][place] for at in range(len(SIZES))] for name in TABLE_I for place in range(3)]
    for y, line in enumerate(marks):
        for x, mark in enumerate(line):
            ground = {True: ALWAYS, False: NEVER, None: "white"}[mark]
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=ground, edgecolor="white"))
            axes.text(x, y, text_of((mark,)), ha="center", va="center", size=9)
    for size in as_in_table_i(found):
        axes.add_patch(
            Rectangle((SIZES.index(size) - 0.5, -0.5), 1, len(marks), fill=False, edgecolor=style.INK, linewidth=2)
        )
    for edge in (2.5, 5.5):
        axes.axhline(edge, color=style.FAINT, linewidth=0.8)
    axes.set_xlim(-0.6, len(SIZES) - 0.4)
    axes.set_ylim(len(marks) - 0.4, -0.6)
    axes.set_xticks(range(len(SIZES)), [f"{size / 2**20:g}" for size in SIZES], size=9)
    axes.tick_params(length=0)
