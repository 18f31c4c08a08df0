"""Figures 2a and 2b of the paper as pictures: peaks, and what checkpoints add to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from checkflow.report import style
from evaluation.paper.peaks import Peaks, of_batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BATCHES = (1, 32)
PAPER = "#cc79a7"
SCHEMES: tuple[tuple[str, str, Callable[[Peaks], int | None]], ...] = (
    ("CheckFreq", style.PLAIN, lambda each: each.checkfreq_bytes),
    ("paper's optimum", PAPER, lambda each: each.paper_bytes),
    ("ours as executed", style.CHECKFLOW, lambda each: each.executed_bytes),
)
WIDTH = 0.27  # of a bar; networks are 1 apart
HELD = "CheckFreq, if its copy is still there at training's peak"


@style.styled()
def draw_peaks(peaks: Sequence[Peaks], timings: str) -> Figure:
    """Figure 2a: peaks as multiples of what training alone needs, and the saving; `timings` names the profile."""

    def panel(axes: Axes, here: Sequence[Peaks]) -> None:
        _bars(axes, here, lambda each, peak: peak / each.training_bytes)
        for place, each in enumerate(here):
            held = each.held_bytes / each.training_bytes
            edges = place - 1.5 * WIDTH, place - 0.5 * WIDTH
            axes.hlines(held, *edges, color=style.INK, linewidth=1.6, label="" if place else HELD)
            ours = place + WIDTH, each.executed_bytes / each.training_bytes
            _note(axes, ours, f"-{each.saving:.0%}" if each.saving else "0%", style.CHECKFLOW)
        axes.axhline(1, color=style.INK, linewidth=1, linestyle="--", label="training alone")
        axes.set_ylim(0, 1.65)
        axes.set_ylabel("peak / training alone")

    title = f"Peak GPU memory ({timings}); above ours, what it saves of CheckFreq's peak"
    return _panels(peaks, panel, title, height_in=7.2)


@style.styled()
def draw_added(peaks: Sequence[Peaks], timings: str) -> Figure:
    """Figure 2b: what checkpoints add to training's peak, in percent of their own bytes; `timings` as above."""

    def panel(axes: Axes, here: Sequence[Peaks]) -> None:
        for at, share, colour in _bars(axes, here, _added_percent):
            _note(axes, (at, share), f"{share:.0f}" if round(share) or not share else "<1", colour, size=9)
        axes.set_ylim(0, 115)
        axes.set_ylabel("added to the peak\n(% of the state)")

    title = f"What checkpoints add to training's peak ({timings}); 0 is not one byte"
    return _panels(peaks, panel, title, height_in=6.4)


def _added_percent(each: Peaks, peak_bytes: int) -> float:
    return 100 * (peak_bytes - each.training_bytes) / each.state_bytes


def _panels(
    peaks: Sequence[Peaks], panel: Callable[[Axes, Sequence[Peaks]], None], title: str, height_in: float
) -> Figure:
    """A panel for each batch size, and one legend."""
    figure = style.new_figure(height_in)
    panels = figure.subplots(len(BATCHES), 1, sharey=True)
    for axes, batch in zip(panels, BATCHES, strict=True):
        here = of_batch(peaks, batch)
        panel(axes, here)
        axes.set_title(f"batch {batch}")
        axes.set_xticks(range(len(here)), [_name(each) for each in here])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.6, len(here) - 0.4)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _bars(axes: Axes, peaks: Sequence[Peaks], height: Callable[[Peaks, int], float]) -> list[tuple[float, float, str]]:
    """Draw a bar for each scheme and network; (place, height, colour) of each."""
    drawn: list[tuple[float, float, str]] = []
    for number, (name, colour, peak_of) in enumerate(SCHEMES):
        known = [(place, each, peak_of(each)) for place, each in enumerate(peaks)]
        bars = [(place + (number - 1) * WIDTH, height(each, peak)) for place, each, peak in known if peak is not None]
        if bars:
            places, heights = zip(*bars, strict=True)
            axes.bar(places, heights, width=WIDTH * 0.94, color=colour, label=name)
        drawn += [(at, tall, colour) for at, tall in bars]
    return drawn


def _note(axes: Axes, at: tuple[float, float], text: str, colour: str, size: float = 11) -> None:
    axes.annotate(text, at, (0, 3), textcoords="offset points", ha="center", color=colour, weight="bold", size=size)


def _name(each: Peaks) -> str:
    return each.network if each.interval == 1 else f"{each.network}\n(every {each.interval} iterations)"
