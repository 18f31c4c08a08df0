"""How every picture looks: one palette that colour-blind readers can tell apart, and matplotlib's settings with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from checkflow.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette (Color Universal Design, 2008), named by what a colour stands for.
TRAINING = "#9db8d9"  # a pale ground for what is there without checkpoints
SNAPSHOT = "#d55e00"
LIVE = "#009e73"
PLAIN = "#0072b2"
CHECKFLOW = SNAPSHOT
INK, FAINT = "#333333", "#8a8a8a"
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

WIDTH_IN = 11.0
DPI = 110


@contextmanager
def styled(option: str = "--report") -> Iterator[None]:
    """Draw in this style: a context, or a decorator of a function that draws. Raises InputError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.rcsetup import cycler
    except ImportError:
        raise InputError(f"{option}: needs matplotlib; pip install 'checkflow[plot]'") from None
    style = rc_context(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": INK,
            "axes.prop_cycle": cycler(color=CYCLE),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 12,
            "figure.titlesize": 13,
            "font.size": 11,
            "legend.frameon": False,
            "svg.hashsalt": "checkflow",  # the same picture is the same file
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    with style:
        yield


def new_figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    """An empty figure; to be called, like all that draws on it, within `styled`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")


def byte_unit(largest_bytes: int) -> tuple[int, str]:
    """(bytes, name) of the unit for an axis that ends at so many bytes."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest_bytes >= size:
            return size, name
    return 1, "B"


def time_unit(longest_ns: float) -> tuple[float, str]:
    """(nanoseconds, name) of the unit for an axis that ends at so many nanoseconds."""
    for size, name in ((1e9, "s"), (1e6, "ms")):
        if longest_ns >= size:
            return size, name
    return 1e3, "µs"
