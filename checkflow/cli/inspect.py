"""checkflow inspect: what a schedule or a graph file says, for a person."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from checkflow.cli import _console
from checkflow.cli._options import GivenPath, OutputPath, default_output, was_given
from checkflow.errors import EXIT_DONE, FormatError, InputError
from checkflow.graph import Graph
from checkflow.graphfile import FORMAT as GRAPH_FORMAT
from checkflow.graphfile import read_graph
from checkflow.jsonfile import check_outputs, read_text, write_text
from checkflow.report import dagfile
from checkflow.report.certificate import certified
from checkflow.report.operators import critical_path
from checkflow.schedule import FORMAT as SCHEDULE_FORMAT
from checkflow.schedule import Place, Schedule, read_schedule
from checkflow.units import format_bytes, format_ns, format_rate

LONGEST = 5  # operators of the critical path that are shown


@click.command()
@click.argument("file", type=GivenPath(path_type=Path))
@click.option("--rows", type=click.IntRange(min=0), default=20, show_default=True, help="Rows to show; 0 shows all.")
@click.option("--export", "kind", type=click.Choice(tuple(dagfile.FORMATS)),
              help="Write the graph's operators and what they hand on to a file for other tools.")  # fmt: skip
@click.option("-o", "--output", type=OutputPath(),
              help="File to export to; its name may say the format  [default: as FILE is named]")  # fmt: skip
def command(file: Path, rows: int, kind: str | None, output: Path | None) -> int:
    """Show FILE: a schedule's certificate and actions, or a graph's critical path, operators and storages."""
    head = read_text(file)[:200]
    exported = _exported(file, kind, output)
    if exported:
        if was_given("rows"):
            raise InputError("--rows: is of what is shown, and an export has every operator; leave it out")
        check_outputs([file], exported[1])
    if SCHEDULE_FORMAT in head:
        if exported:
            raise InputError(f"{file}: is a schedule, and operators are exported; give the graph that it was made from")
        _show_schedule(read_schedule(file), rows or None)
    elif GRAPH_FORMAT in head:
        if exported:
            _export(read_graph(file), *exported)
        else:
            _show_graph(read_graph(file), rows or None)
    else:
        raise FormatError(f"{file}: is neither a schedule nor a graph; give a file that checkflow wrote")
    return EXIT_DONE


def _exported(file: Path, kind: str | None, output: Path | None) -> tuple[str, Path] | None:
    """The format and the file that are asked for; None where nothing is. Raises InputError where they do not fit."""
    if kind is None and output is None:
        return None
    if output is None:
        assert kind is not None
        return kind, default_output(str(file), kind).with_suffix("")  # NAME.graphml.json -> NAME.graphml
    named = output.suffix.removeprefix(".")
    if kind is None and named not in dagfile.FORMATS:
        raise InputError(f"{output}: its name has to end in .graphml or .dot; or say --export graphml or --export dot")
    if kind is not None and named in dagfile.FORMATS and named != kind:
        raise InputError(f"{output}: its name says {named}, and --export {kind}; let one follow the other")
    return kind or named, output


def _export(graph: Graph, kind: str, output: Path) -> None:
    write_text(output, dagfile.FORMATS[kind](graph))
    _console.say(f"{graph.steps} operators of {graph.model}, as {kind}: {output}")


def _show_schedule(schedule: Schedule, limit: int | None) -> None:
    certificate = schedule.certificate
    arguments = " ".join(f"{name}={value}" for name, value in schedule.arguments)
    _console.say(
        f"{schedule.model} {arguments} on {schedule.device}: {format_bytes(schedule.state_bytes)} of state every "
        f"{schedule.interval} iteration(s) over {format_rate(schedule.bandwidth_bytes_per_s)}, {schedule.formulation}/"
        f"{schedule.transfers}"
    )
    _console.say(
        f"peak {format_bytes(certificate.peak_bytes)}, {format_bytes(certificate.training_peak_bytes)} training alone; "
        f"{certified(certificate)}"
    )
    if schedule.pause is not None:
        where, how_long = _where(schedule, schedule.pause), format_ns(certificate.pause_ns)
        _console.say(f"{schedule.policy}: training stands still for {how_long} at {where}")
    _console.say()
    parts = any(row.back for row in schedule.actions)
    table = _table("tensor", *(["before"] if parts else []), "bytes", "snapshot at", "offload at", "release at")
    names = schedule.names()
    for row in schedule.actions[:limit]:
        table.add_row(
            f"{names[row.tensor]}[{row.offset}:{row.offset + row.bytes}]",
            *([str(row.back)] if parts else []),
            format_bytes(row.bytes),
            *(_where(schedule, place) for place in (row.snapshot, row.offload, row.release)),
        )
    _console.out.print(table)
    _more(len(schedule.actions), limit, "actions")


def _where(schedule: Schedule, place: Place | None) -> str:
    if place is None:
        return ""
    iteration, number = place
    anchor = schedule.anchors[number - 1]
    return f"{iteration}: {anchor.kind} {anchor.subject}".strip()


def _show_graph(graph: Graph, limit: int | None) -> None:
    _console.say(
        f"{graph.model}: {graph.steps} operators, {format_ns(graph.iteration_time_ns)} on {graph.device}, peak "
        f"{format_bytes(graph.training_peak_bytes)}"
    )
    _console.say()
    _show_critical_path(graph)
    table = _table("step", "operator", "time", "reads", "writes")
    longest = sorted(enumerate(graph.ops, start=1), key=lambda item: -item[1].time_ns)
    for step, op in longest[:limit]:
        table.add_row(
            str(step),
            op.name,
            format_ns(op.time_ns),
            *(", ".join(graph.tensors[index].name for index in indices[:3]) for indices in (op.reads, op.writes)),
        )
    _console.out.print(table)
    _more(graph.steps, limit, "operators")
    table = _table("storage", "role", "bytes", "born", "freed")
    for tensor in sorted(graph.tensors, key=lambda t: -t.size_bytes)[:limit]:
        table.add_row(tensor.name, tensor.role, format_bytes(tensor.size_bytes), str(tensor.born), str(tensor.freed))
    _console.out.print(table)
    _more(len(graph.tensors), limit, "storages")


def _show_critical_path(graph: Graph) -> None:
    path = critical_path(graph)
    _console.say(
        f"critical path: {format_ns(path.time_ns)}, {path.share:.0%} of the iteration, through {len(path.steps)} "
        "operators, each of which needs the one before; the longest of them:"
    )
    _console.say()
    table = _table("step", "operator", "time", "of the path")
    for step in path.longest(graph, LONGEST):
        op = graph.ops[step - 1]
        table.add_row(str(step), op.name, format_ns(op.time_ns), f"{op.time_ns / (path.time_ns or 1):.1%}")
    _console.out.print(table)
    _console.say()


def _table(*headers: str) -> Table:
    """Names are folded where the terminal is narrow: cut, they could not be told apart."""
    table = Table(box=None)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _more(count: int, limit: int | None, what: str) -> None:
    if limit is not None and count > limit:
        _console.say(f"... and {count - limit} more {what}; --rows 0 shows all")
        _console.say()
