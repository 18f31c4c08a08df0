"""A report as tables in the terminal."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from .results import Overhead, Report, Tool


def show(report: Report, console: Console) -> None:
    """What could not run comes first, what is not durable is marked in every table."""
    console.print(
        f"{report.machine}; {report.date}; {report.seconds / 60:.1f} min; load at the start {report.load:.1f}\n"
    )
    console.print(tools(report.tools))
    for workload, reason in report.skipped.items():
        console.print(f"{workload}: {reason}")
    for tier in ("disk", "memory"):
        for workload in report.workloads:
            rows = [each for each in report.overheads if (each.tier, each.workload) == (tier, workload)]
            if rows:
                console.print()
                console.print(overheads(f"{report.workloads[workload]}; {_survives(tier)}", rows, report))
    for table in (saves(report), restores(report), kills(report), faults(report)):
        if table.row_count:
            console.print()
            console.print(table)


def tools(found: tuple[Tool, ...]) -> Table:
    table = _table("", "version", "durable", "verifies", "how it is used, or why it is not")
    for tool in found:
        durable, verifies = ("yes" if flag else "no" for flag in (tool.durable, tool.verifies))
        prepared = "".join(f"; prepared {workload} in {took_s:.0f} s" for workload, took_s in tool.prepared_s.items())
        what = f"[red]{tool.missing}[/]" if tool.missing else tool.what + prepared
        table.add_row(tool.name, tool.version, durable, verifies, what)
    return table


def overheads(title: str, rows: list[Overhead], report: Report) -> Table:
    table = _table(
        "", "every", "throughput lost", "(lowest, highest)", "by mean", "median iteration", "p99",
        "blocked ms / iteration", "ms / save", "host MB", "GPU MB", "written MB / save", title=title,
    )  # fmt: skip
    durable = {tool.name: tool.durable for tool in report.tools}
    for each in sorted(rows, key=lambda row: (row.interval, row.loss)):
        written = each.tier == "disk" and each.contender != "none"
        table.add_row(
            each.contender + ("" if durable[each.contender] or each.tier == "memory" else " (not durable)"),
            ("~" if each.spread else "") + str(each.interval),
            f"{each.loss:.1%}",
            f"{each.low:.1%}, {each.high:.1%}",
            f"{each.mean_loss:.1%}",
            "" if each.spread else f"{each.median_ratio:.3f}",
            "" if each.spread else f"{each.p99_ratio:.2f}",
            f"{each.blocked_ms:.2f}",
            f"{each.blocked_save_ms:.1f}",
            f"{each.extra_host_bytes / 1e6:.0f}",
            f"{each.extra_gpu_bytes / 1e6:.0f}",
            f"{each.written_bytes / 1e6:.1f}" if written else "",
        )
    return table


def saves(report: Report) -> Table:
    table = _table("one save, waited for", "workload", "tier", "blocked ms", "complete ms", "GB/s", "state MB")
    for each in sorted(report.saves, key=lambda save: (save.workload, save.tier, save.complete_ms)):
        table.add_row(
            _marked(each.contender, each.tier, report), each.workload, each.tier, f"{each.blocked_ms:.1f}",
            f"{each.complete_ms:.1f}", f"{each.bytes_per_s / 1e9:.2f}", f"{each.state_bytes / 1e6:.1f}",
        )  # fmt: skip
    return table


def restores(report: Report) -> Table:
    table = _table(
        "restore, a new process",
        "workload",
        "case",
        "start s",
        "attach s",
        "restore s",
        "of all",
        "restored",
        "exact",
    )
    for each in sorted(report.restores, key=lambda restore: (restore.workload, restore.case, restore.tool_s)):
        exact = "" if each.exact is None else "yes" if each.exact else "NO"
        table.add_row(
            _marked(each.contender, each.tier, report), each.workload, each.case, f"{each.start_s:.2f}",
            f"{each.attach_s:.2f}", f"{each.restore_s:.2f}", each.span,
            f"{each.iteration} of {each.expected}", exact,
        )  # fmt: skip
    return table


def kills(report: Report) -> Table:
    table = _table(
        "iterations lost at a kill", "workload", "tier", "mean", "most", "none lost", "kills", "refused",
        "iterations in a life",
    )  # fmt: skip
    for each in sorted(report.kills, key=lambda kills: (kills.workload, kills.tier, sum(kills.lost))):
        table.add_row(
            _marked(each.contender, each.tier, report), each.workload, each.tier,
            f"{statistics.mean(each.lost or [0]):.2f}", str(max(each.lost, default=0)), str(each.lost.count(0)),
            str(len(each.lost)), str(each.refused), f"{statistics.median(each.completed or [0]):.0f}",
        )  # fmt: skip
    return table


def faults(report: Report) -> Table:
    table = _table("fault", "contender", "outcome", "what it said")
    for each in sorted(report.faults, key=lambda fault: (fault.fault, fault.contender)):
        table.add_row(each.fault, each.contender, each.outcome, each.detail[:90])
    return table


def _survives(tier: str) -> str:
    return "on disk" if tier == "disk" else "in memory (survives a killed trainer)"


def _marked(name: str, tier: str, report: Report) -> str:
    durable = {tool.name: tool.durable for tool in report.tools}[name]
    return name if durable or tier == "memory" else f"{name} (not durable)"


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(*columns, box=None, pad_edge=False, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.no_wrap = False
    return table
