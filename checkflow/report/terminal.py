"""A compilation at a glance, in the terminal: a table of figures, and memory over time with the link's use under it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from rich.console import Console
from rich.text import Text

from checkflow.compiler import CHECKFLOW, Compiled
from checkflow.plan import PPM, Plan, ProvenBy, Transfers
from checkflow.policies import checkfreq
from checkflow.report.certificate import certified
from checkflow.report.columns import show_pairs
from checkflow.report.operators import critical_path
from checkflow.report.timeline import Timeline, timeline_of
from checkflow.simulation.drift import tolerated_drift_ppm
from checkflow.units import format_bytes, format_ns, format_rate

BARS = " ▁▂▃▄▅▆▇█"
SNAPSHOTS = "▒"  # told from training without colours too
ROWS = 8


def rows_of(compiled: Compiled) -> list[tuple[str, str]]:
    """The summary a person reads, as (name, value)."""
    problem, certificate, schedule = compiled.problem, compiled.schedule.certificate, compiled.schedule
    capacity = problem.clock(problem.steps) * schedule.period / 1e9
    arguments = " ".join(f"{name}={value}" for name, value in compiled.graph.arguments)
    path = critical_path(compiled.graph)
    moved_bytes, held_bytes = sum(row.bytes for row in schedule.actions), schedule.held_bytes()
    ranks = f", one of {compiled.graph.world_size} ranks" if compiled.graph.world_size > 1 else ""
    every = "every iteration" if problem.interval == 1 else f"every {problem.interval} iterations"
    rows = [
        ("model", f"{compiled.graph.model} {arguments}".strip()),
        (
            "iteration",
            f"{format_ns(compiled.graph.iteration_time_ns)}, {problem.steps} operators, on {schedule.device}{ranks}",
        ),
        ("critical path", f"{format_ns(path.time_ns)}, {path.share:.0%} of it, through {len(path.steps)} operators"),
        ("state", f"{format_bytes(problem.state_bytes)} in {len(problem.state)} tensors, checkpointed {every}"),
        ("link", f"{format_rate(schedule.bandwidth_bytes_per_s)}, {moved_bytes / capacity:.0%} used"),
        ("training peak", format_bytes(certificate.training_peak_bytes)),
        ("peak", _against(certificate.peak_bytes, certificate.training_peak_bytes)),
        ("CheckFreq's peak", _against(checkfreq.at_best(problem).peak_bytes, certificate.training_peak_bytes)),
        ("snapshots", f"{format_bytes(certificate.snapshot_bytes - held_bytes)}; the rest leaves directly"),
        ("certificate", certified(certificate)),
        ("solver", f"{certificate.solver}: {certificate.solver_why}"),
    ]
    factored = sum(row.factor_rows > 0 for row in schedule.gradients)
    as_factors = f" ({factored} as factors)" if factored else ""
    held = f", {format_bytes(held_bytes)} of them held a while" if held_bytes else ""
    if schedule.replica:
        sent = f"{format_bytes(moved_bytes)} of gradients and the like an iteration{as_factors}{held}"
        rows.insert(4, ("replica", f"in host memory, which makes the updates, too: {sent}"))
        rows.insert(5, ("restore", "reads a whole checkpoint"))
    elif schedule.lanes > 1:
        each = f"{format_bytes(moved_bytes // schedule.lanes)} an iteration with the gradients of the others"
        rows.insert(4, ("parts", f"one of {schedule.lanes} leaves in each iteration: {each}{as_factors}{held}"))
        rows.insert(5, ("restore", f"reads, then makes updates again for up to {format_ns(certificate.replay_ns)}"))
    elif schedule.gradients:
        parts = len({row.back for row in schedule.actions})
        gradients = f"{format_bytes(moved_bytes - problem.state_bytes)} of gradients go along"
        rows.insert(4, ("parts", f"{parts}, each as it is in another iteration; {gradients} to rebuild them{held}"))
        rows.insert(5, ("restore", f"reads, then makes updates again for {format_ns(certificate.replay_ns)}"))
    if schedule.policy != CHECKFLOW:
        rows.insert(-1, ("policy", schedule.policy))
        rows.insert(-1, ("pause", f"{format_ns(certificate.pause_ns)} for each checkpoint"))
    if compiled.planned is not None and compiled.plan.transfers_kind is Transfers.PACKED:
        rows.insert(-1, (f"{compiled.plan.formulation} plan", _model(compiled.plan)))
    if compiled.why_not_each:
        rows.insert(4, ("interval", f"{problem.interval}: every iteration is too often; {compiled.why_not_each}"))
    if schedule.static_state_bytes:
        rows.insert(4, ("unchanging state", f"{format_bytes(schedule.static_state_bytes)}, copied once"))
    if schedule.slack_ppm:
        rows.append(("slack", f"planned with times and bandwidth {schedule.slack_ppm / 1e4:g}% short"))
    drift = tolerated_drift_ppm(schedule, compiled.graph)
    waits = "training waits longer" if certificate.pause_ns else "anything waits"
    cut = ": cut to end at deadlines; --slack leaves room" if drift < PPM // 1000 and not schedule.slack_ppm else ""
    rows.append(("drift", f"the link may be {drift / 1e4:.1f}% slower, or operators faster, before {waits}{cut}"))
    return rows


def _against(peak_bytes: int, training_bytes: int) -> str:
    extra = peak_bytes - training_bytes
    return f"{format_bytes(peak_bytes)} " + (f"(+{format_bytes(extra)})" if extra else "(no added byte)")


def _model(plan: Plan) -> str:
    """What the paper's integer program found, before its plan was moved to anchors."""
    chunks = "" if plan.proven_by is ProvenBy.BOUND else ", for these chunks: others may need less"
    proven = "optimal" if plan.gap == 0 else f"within {plan.gap:.2e} of {format_bytes(plan.lower_bound_bytes)}"
    return f"{format_bytes(plan.peak_bytes)} in its own terms, {proven} by {plan.proven_by}{chunks}"


def show(
    console: Console,
    compiled: Compiled,
    *,
    notes: tuple[str, ...],
    memory_bytes: int | None,
    snapshot_ns: int | None,
    mirror_ns: int | None,
    trace_s: float,
) -> None:
    """Print the summary and the timeline. `snapshot_ns`: what the snapshots' copies take on the compute stream;
    `mirror_ns`: what a mirror is sent an iteration's part in, on the network."""
    rows = [(name, Text(value)) for name, value in rows_of(compiled)]
    if snapshot_ns:
        share = snapshot_ns / (compiled.graph.iteration_time_ns * compiled.schedule.period)
        told = f"{format_ns(snapshot_ns)} on the compute stream, {share:.1%} of the time"
        rows.append(("snapshot copies", Text(told)))
    if mirror_ns is not None:
        sent = f"{format_bytes(compiled.schedule.sent_bytes())} an iteration, {format_ns(mirror_ns)} of the network"
        share = mirror_ns / compiled.graph.iteration_time_ns
        rows.append(("replicate=1", Text(f"sends another machine {sent}: {share:.1%}, beside training's collectives")))
    rows.append(("took", Text(f"trace {trace_s:.2f} s, plan {compiled.plan_s:.3f} s")))
    rows += [("note", Text(note)) for note in notes]
    if memory_bytes is not None and compiled.schedule.certificate.peak_bytes > memory_bytes:
        rows.append(("warning", Text(f"the peak is above the device's {format_bytes(memory_bytes)}", style="red")))
    show_pairs(console, rows)
    console.print()
    for line in chart(timeline_of(compiled), max(40, min(console.width, 120) - 12)):
        console.print(line, no_wrap=True, overflow="crop")


def chart(timeline: Timeline, width: int) -> list[Text]:
    """Memory (training, and snapshots on top) and link use over one period, `width` columns wide."""
    columns = _columns(timeline, width)
    top = max(timeline.memory_bytes)
    whole = top or 1  # of nothing there is a chart, too
    lines = [Text(" " * 11 + _phase_line(timeline, width), style="dim")]
    for row in range(ROWS, 0, -1):
        label = format_bytes(top * row // ROWS) if row in (ROWS, ROWS // 2) else ""
        line = Text(f"{label:>10} ")
        for training, total, _ in columns:
            line.append(*_cell(training / whole * ROWS - row + 1, total / whole * ROWS - row + 1))
        lines.append(line)
    link = Text(f"{'link':>10} ")
    for _, _, use in columns:
        link.append(BARS[round(use * (len(BARS) - 1))], style="green")
    lines.append(link)
    right = format_ns(timeline.period_ns)
    lines.append(Text(" " * 11 + "0" + right.rjust(width - 1), style="dim"))
    lines.append(
        Text(f"{'':>11}█ training  ", style="blue")
        .append(f"{SNAPSHOTS} snapshots  ", "red")
        .append("█ link busy", "green")
    )
    return lines


def _cell(training: float, total: float) -> tuple[str, str]:
    """The character of one cell whose filling, in cells from its bottom, is given."""
    if training >= 1:
        return BARS[-1], "blue"
    if total > training and total > 0:
        return SNAPSHOTS if total >= 1 else BARS[max(1, round(total * 8))], "red"
    return BARS[max(0, round(training * 8))], "blue"


def _columns(timeline: Timeline, width: int) -> list[tuple[int, int, float]]:
    """(most training bytes, most bytes, link use) in each of `width` equal parts of the period."""
    period, edges = timeline.period_ns, timeline.edges_ns
    busy = [0.0] * width
    for span in timeline.spans:
        begin = span.begin_ns % period
        end = begin + span.end_ns - span.begin_ns
        first, last = int(begin * width / period), int(end * width / period)
        for column in range(first, last + 1):
            low, high = column * period / width, (column + 1) * period / width
            busy[column % width] += max(0.0, min(end, high) - max(begin, low))
    columns = []
    for column in range(width):
        first = bisect_right(edges, column * period // width) - 1
        last = max(first + 1, min(bisect_left(edges, (column + 1) * period // width), len(timeline.memory_bytes)))
        columns.append(
            (
                max(timeline.training_bytes[first:last]),
                max(timeline.memory_bytes[first:last]),
                min(1.0, busy[column] * width / period),
            )
        )
    return columns


def _phase_line(timeline: Timeline, width: int) -> str:
    line = [" "] * width
    for name, at_ns in timeline.phases:
        start = min(at_ns * width // timeline.period_ns, width - 1)
        for offset, character in enumerate("╷" + name):
            if start + offset < width:
                line[start + offset] = character
    return "".join(line)
