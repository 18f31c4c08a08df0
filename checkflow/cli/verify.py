"""checkflow verify: replay a schedule against its graph, without the solver."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import click

from checkflow import hardware
from checkflow.cli import _console
from checkflow.cli._options import GivenName, GivenPath, json_option
from checkflow.errors import EXIT_DONE, InputError, VerificationError
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.schedule import read_schedule
from checkflow.units import format_bytes, format_ns
from checkflow.verify import verify


@click.command()
@click.argument("schedule", type=GivenPath(path_type=Path))
@click.argument("graph", type=GivenPath(path_type=Path))
@click.option(
    "--device",
    type=GivenName(),
    metavar="NAME|FILE",
    help="Profile whose times GRAPH gets, as `checkflow compile GRAPH --device` gives them; needed where SCHEDULE was "
    "compiled with a YAML file.  [default: the bundled device that SCHEDULE names, or the times that GRAPH has]",
)
@json_option
def command(schedule: Path, graph: Path, device: str | None, as_json: bool) -> int:
    """Check that SCHEDULE keeps every promise it makes about GRAPH (from `checkflow trace`), to the byte."""
    promised, given = read_schedule(schedule), read_graph(graph)
    of = _timed(given, device, promised.device)
    with_times = "" if of is given else f", with times of {of.device}"
    try:
        verified = verify(promised, of)
    except VerificationError as error:
        if as_json:
            click.echo(json.dumps({"verified": False, "message": str(error)}))
        advice = "if the training or its trace is another by now, compile that very graph"
        if of.entry_apart is not None and promised.gradients:
            advice = f"trace with --divided --policy {promised.policy}"
        elif promised.device != of.device:
            advice = "trace with the --device that it is for, and compile that very graph"
            if promised.device in hardware.NAMES and device is not None:
                advice = "leave --device out"
            elif promised.device not in hardware.NAMES:
                advice = f"where a YAML file is the profile of {promised.device!r}, give it with --device; or {advice}"
        raise VerificationError(
            f"{schedule}: does not keep its promises about {graph}{with_times}: {error}; {advice}"
        ) from None
    if as_json:
        click.echo(json.dumps({"verified": True} | dataclasses.asdict(verified)))
        return EXIT_DONE
    _console.say(
        f"{schedule}: verified{with_times}; peak {format_bytes(verified.peak_bytes)}, training alone "
        f"{format_bytes(verified.training_peak_bytes)}; no schedule with these anchors needs less than "
        f"{format_bytes(verified.lower_bound_bytes)}"
        + (f"; training stands still for {format_ns(verified.pause_ns)}" if verified.pause_ns else "")
    )
    return EXIT_DONE


def _timed(graph: Graph, asked: str | None, promised: str) -> Graph:
    """With the times of the device that is asked for, or of the one that was promised, where its figures are known."""
    if asked is not None:
        return hardware.retime(graph, hardware.load_profile(asked))
    if promised != graph.device and promised in hardware.NAMES:
        with contextlib.suppress(InputError):  # of ranks, and this device has no network: it is of another graph
            return hardware.retime(graph, hardware.load_profile(promised))
    return graph
