"""checkflow verify: replay a schedule against its graph, without the solver."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from checkflow.cli import _console
from checkflow.cli._options import GivenPath, json_option
from checkflow.errors import EXIT_DONE, VerificationError
from checkflow.graphfile import read_graph
from checkflow.schedule import read_schedule
from checkflow.units import format_bytes, format_ns
from checkflow.verify import verify


@click.command()
@click.argument("schedule", type=GivenPath(path_type=Path))
@click.argument("graph", type=GivenPath(path_type=Path))
@json_option
def command(schedule: Path, graph: Path, as_json: bool) -> int:
    """Check that SCHEDULE keeps every promise it makes about GRAPH (from `checkflow trace`), to the byte."""
    promised, of = read_schedule(schedule), read_graph(graph)
    try:
        verified = verify(promised, of)
    except VerificationError as error:
        if as_json:
            click.echo(json.dumps({"verified": False, "message": str(error)}))
        raise VerificationError(
            f"{schedule}: does not keep its promises about {graph}: {error}; if the training or its trace is "
            "another by now, compile that very graph"
        ) from None
    if as_json:
        click.echo(json.dumps({"verified": True} | dataclasses.asdict(verified)))
        return EXIT_DONE
    _console.say(
        f"{schedule}: verified; peak {format_bytes(verified.peak_bytes)}, training alone "
        f"{format_bytes(verified.training_peak_bytes)}; no schedule with these anchors needs less than "
        f"{format_bytes(verified.lower_bound_bytes)}"
        + (f"; training stands still for {format_ns(verified.pause_ns)}" if verified.pause_ns else "")
    )
    return EXIT_DONE
