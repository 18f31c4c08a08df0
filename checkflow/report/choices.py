"""What a policy was chosen from, as a table and as JSON."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from checkflow.choice import Comparison, Option
from checkflow.simulation.incidents import Loss
from checkflow.units import format_bytes, format_ns

_FIGURES = ("stall", "device memory", "host memory", "redone by a kill", "by a lost machine", "restore", "wasted")


def table_of(comparison: Comparison) -> Group:
    """A line for each option, the chosen one first; and why other policies are none."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("policy")
    table.add_column("every", justify="right")
    for heading in _FIGURES:
        table.add_column(heading, justify="right")
    for option in comparison.options:
        waste = option.expected
        table.add_row(
            option.policy + (f", {option.lanes} lanes" if option.lanes > 1 else ""),
            str(option.interval),
            f"{waste.stall:.2%}",
            f"+{format_bytes(option.added_bytes)}",
            format_bytes(option.host_bytes),
            *(f"{waste.redone[loss]:.1f}" for loss in (Loss.TRAINER, Loss.MACHINE)),
            format_ns(_restore_ns(option)),
            f"{waste.wasted:.2%}",
            style="bold" if option is comparison.options[0] else "",
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
