"""checkflow verify: replay a schedule against its graph, without the solver."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import click

from checkflow import hardware
from checkflow.cli import _console
from checkflow.cli._options import GivenPath, json_option
from checkflow.errors import EXIT_DONE, InputError, VerificationError
from checkflow.graphfile import read_graph
from checkflow.schedule import read_schedule
from checkflow.units import format_bytes, format_ns
from checkflow.verify import verify


@click.command()
@click.argument("schedule", type=GivenPath(path_type=Path))
@click.argument("graph", type=GivenPath(path_type=Path))
@json_option
def command(schedule: Path, graph: Path, as_json: bool) -> int:
    """Check that SCHEDULE keeps every promise it makes about GRAPH (from `checkflow trace`), to the byte.

    A graph with times of another device than the schedule's is given those, as `checkflow compile GRAPH --device` does.
    """
    promised, of = read_schedule(schedule), read_graph(graph)
    with_times = ""
    if promised.device != of.device and promised.device in hardware.NAMES:
        with contextlib.suppress(InputError):  # of ranks, and this device has no network: it is of another graph
            of = hardware.retime(of, hardware.load_profile(promised.device))
            with_times = f", with times of {promised.device}"
    try:
        verified = verify(promised, of)
    except VerificationError as error:
        if as_json:
            click.echo(json.dumps({"verified": False, "message": str(error)}))
        advice = "if the training or its trace is another by now, compile that very graph"
        if promised.device != of.device:
            advice = "trace with the --device that it is for, and compile that very graph"
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
