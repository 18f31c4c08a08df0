"""A report as Markdown, for benchmarks/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .results import Overhead, Report

CASES = ("cold", "warm", "killed")


def markdown(report: Report) -> str:
    """Every table of the report; contenders whose checkpoints on disk are not durable have a star there."""
    parts = [f"{report.machine}; {report.date}; {report.seconds / 60:.0f} min"]
    for workload, what in report.workloads.items():
        for tier in ("disk", "memory"):
            rows = [each for each in report.overheads if (each.tier, each.workload) == (tier, workload)]
            if rows:
                parts.append(
                    f"**{what}; {'on disk' if tier == 'disk' else 'in memory'}**\n\n{_overheads(rows, report)}"
                )
    tables = {"Restore": _restores, "Kills": _kills, "Faults": _faults, "Saves": _saves}
    for title, table in ((title, make(report)) for title, make in tables.items()):
        if table:
            parts.append(f"**{title}**\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _overheads(rows: Sequence[Overhead], report: Report) -> str:
    intervals = sorted({row.interval for row in rows})
    found = {(row.contender, row.interval): row for row in rows}
    names = sorted({row.contender for row in rows}, key=lambda name: found[name, intervals[0]].loss)
    header = ["", *(f"lost, every {interval}" for interval in intervals), f"p99, every {intervals[0]}"]
    header += [f"blocked ms / save, every {' / '.join(map(str, intervals))}", "host MB", "written MB"]
    lines = []
    for name in names:
        each = [found[name, interval] for interval in intervals]
        lost = [f"{'~' if row.spread else ''}{row.loss:.1%} ({row.low:.0%} to {row.high:.0%})" for row in each]
        written = f"{each[0].written_bytes / 1e6:.1f}" if each[0].tier == "disk" else ""
        blocked = " / ".join(f"{row.blocked_save_ms:.1f}" for row in each)
        host = f"{max(row.extra_host_bytes for row in each) / 1e6:.0f}"
        lines.append([_named(name, each[0].tier, report), *lost, f"{each[0].p99_ratio:.2f}", blocked, host, written])
    return _table(header, lines)


def _restores(report: Report) -> str:
    """Seconds in the tool: the median, its two parts, the extremes; then with Python, torch and the model before it."""
    lines = []
    cases = {(each.workload, each.contender, each.case): each for each in report.restores}
    keys = dict.fromkeys((each.workload, each.contender) for each in report.restores)
    for workload, name in sorted(keys, key=lambda key: (key[0], cases[*key, "cold"].tool_s)):
        figures = [cases[workload, name, case] for case in CASES]
        seconds = [
            f"{each.tool_s:.2f} ({each.attach_s:.2f} + {each.restore_s:.2f})" + (f", {each.span}" if each.span else "")
            for each in figures
        ]
        killed = f"{figures[-1].iteration} of {figures[-1].expected}"
        whole = " / ".join(f"{each.start_s + each.tool_s:.1f}" for each in figures)
        lines.append([_named(name, "disk", report), workload, *seconds, whole, killed])
    return _table(["", "workload", *CASES, "from the process's start", "restored after the kill"], lines)


def _kills(report: Report) -> str:
    lines = [
        [
            _named(each.contender, each.tier, report), each.workload, each.tier,
            f"{statistics.mean(each.lost or [0]):.2f}", str(max(each.lost, default=0)), str(each.lost.count(0)),
            str(len(each.lost)), str(each.refused), f"{statistics.median(each.completed or [0]):.0f}",
        ]
        for each in sorted(
            report.kills, key=lambda kills: (kills.workload, kills.tier, statistics.mean(kills.lost or [0]))
        )
    ]  # fmt: skip
    header = ["", "workload", "tier", "mean lost", "most", "none lost", "kills", "refused", "iterations in a life"]
    return _table(header, lines)


def _faults(report: Report) -> str:
    faults = sorted({each.fault for each in report.faults})
    found = {(each.contender, each.fault): each.outcome for each in report.faults}
    names = sorted({each.contender for each in report.faults})
    return _table(["", *faults], [[name, *(found.get((name, fault), "") for fault in faults)] for name in names])


def _saves(report: Report) -> str:
    lines = [
        [
            _named(each.contender, each.tier, report), each.workload, each.tier, f"{each.blocked_ms:.1f}",
            f"{each.complete_ms:.1f}", f"{each.bytes_per_s / 1e9:.2f}",
        ]
        for each in sorted(report.saves, key=lambda save: (save.workload, save.tier, save.complete_ms))
    ]  # fmt: skip
    return _table(["", "workload", "tier", "blocked ms", "complete ms", "GB/s"], lines)


def _named(name: str, tier: str, report: Report) -> str:
    durable = {tool.name: tool.durable for tool in report.tools}[name]
    return name if durable or tier == "memory" or name == "none" else rf"{name} \*"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) if len(rows) > 2 else ""
