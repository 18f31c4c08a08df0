"""What a policy was chosen from, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.text import Text

from checkflow.choice import Comparison, Option
from checkflow.report.columns import Column, Columns
from checkflow.simulation.incidents import Loss
from checkflow.units import format_bytes, format_ns


def table_of(comparison: Comparison) -> Group:
    """A line for each option, the chosen one first; and why other policies are none."""
    options, wastes = comparison.options, [option.expected for option in comparison.options]

    def column(name: str, texts: Iterable[str], *, right: bool = True) -> Column:
        styles = ["bold", *[""] * (len(options) - 1)]
        return Column(name, tuple(Text(text, style) for text, style in zip(texts, styles, strict=True)), right=right)

    lanes = [f", {option.lanes} lanes" if option.lanes > 1 else "" for option in options]
    left = (
        column("policy", (option.policy + more for option, more in zip(options, lanes, strict=True)), right=False),
        column("every", (str(option.interval) for option in options)),
    )
    table = Columns(
        left,
        (
            column("stall", (f"{waste.stall:.2%}" for waste in wastes)),
            column("device memory", (f"+{format_bytes(option.added_bytes)}" for option in options)),
            column("host memory", (format_bytes(option.host_bytes) for option in options)),
            column("redone by a kill", (f"{waste.redone[Loss.TRAINER]:.1f}" for waste in wastes)),
            column("by a lost machine", (f"{waste.redone[Loss.MACHINE]:.1f}" for waste in wastes)),
            column("restore", (format_ns(_restore_ns(option)) for option in options)),
            column("wasted", (f"{waste.wasted:.2%}" for waste in wastes)),
        ),
    )
    cannot = [Text(f"{policy} cannot: {why}", style="dim") for policy, why in comparison.refused]
    return Group(table, *cannot)


def document_of(comparison: Comparison) -> dict[str, object]:
    """Shares are fractions of the time; redone is iterations for each failure of its class."""
    return {
        "options": [
            {
                "policy": option.policy,
                "interval": option.interval,
                "lanes": option.lanes,
                "wasted": option.expected.wasted,
                "stall": option.expected.stall,
                "added_bytes": option.added_bytes,
                "host_bytes": option.host_bytes,
                "redone_per_failure": {loss.value: option.expected.redone[loss] for loss in Loss},
                "restore_ns": _restore_ns(option),
            }
            for option in comparison.options
        ],
        "refused": dict(comparison.refused),
    }


def _restore_ns(option: Option) -> int:
    """From disk, with the updates that are made again."""
    return option.costs.restore_disk_ns + option.costs.remake_ns
