"""checkflow sweep: grids of compilations, and where the edge of feasibility lies."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path

import click

from checkflow.cli import _console, exit_code_of
from checkflow.cli._options import (
    MOST_WHOLE,
    GivenName,
    OutputPath,
    interval_of,
    json_option,
    list_of,
    settings_of,
    was_given,
)
from checkflow.errors import EXIT_DONE, EXIT_NO, InputError
from checkflow.jsonfile import check_outputs
from checkflow.plan import Formulation
from checkflow.sources import inputs_of
from checkflow.sweep import files, tables
from checkflow.sweep.cells import CHECKFLOW, Axis, Grid, Question
from checkflow.sweep.running import Given, answers, in_order
from checkflow.units import fraction_ppm, parse_bytes, parse_rate


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, type=GivenName())
@click.option("--batch-size", metavar="N,...", help="Short for --set batch_size=N,...")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE,...", help="Values of a factory's argument.")
@click.option("--bandwidth", metavar="RATE,...", help="Of the link to the host  [default: the device's]")
@click.option("--device", metavar="NAME|FILE,...", help="Profiles  [default: rtx3090, or the times that a graph has]")
@click.option("--policy", default="checkflow", show_default=True, metavar="NAME,...", help="Whose plans.")
@click.option("--formulation", default="direct", show_default=True, metavar="NAME,...", help="Of policy checkflow.")
@click.option(
    "--interval", default="1", show_default=True, metavar="N|auto,...", help="Iterations between checkpoints."
)
@click.option("--chunk", metavar="SIZE,...", help="Largest chunk  [default: as large as the plan allows]")
@click.option("--slack", default="0", show_default=True, metavar="FRACTION,...", help="Drift to tolerate.")
@click.option("--find", type=click.Choice([axis.value for axis in Axis]),
              help="Look for the least that is feasible, for each cell of the other axes.")  # fmt: skip
@click.option("--up-to", type=click.IntRange(1, MOST_WHOLE), default=4096, show_default=True,
              help="Largest batch that --find batch_size tries.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Worker processes  [default: one for each core]")
@click.option("-o", "--output", "outputs", multiple=True, type=OutputPath(),
              help="Write the rows, .json or .csv; may be given for both.")  # fmt: skip
@click.option("--journal", type=OutputPath(),
              help="Where each result is kept as it comes  [default: beside the first output]")  # fmt: skip
@json_option
def command(
    models: tuple[str, ...],
    batch_size: str | None,
    settings: tuple[str, ...],
    bandwidth: str | None,
    device: str | None,
    policy: str,
    formulation: str,
    interval: str,
    chunk: str | None,
    slack: str,
    find: str | None,
    up_to: int,
    jobs: int | None,
    outputs: tuple[Path, ...],
    journal: Path | None,
    as_json: bool,
) -> int:
    """Compile each cell of a grid: every MODEL with every combination of the options' values.

    Each option takes several values, separated by commas. A model is traced once, and timed and planned for each
    device, bandwidth and so on. What is done is kept in the journal; the same command again does only what is missing.
    """
    if find != Axis.BATCH_SIZE and was_given("up_to"):
        raise InputError("--up-to: is the largest batch of --find batch_size; leave it out")
    policies = list_of(policy, str, "--policy")
    if CHECKFLOW not in policies and was_given("formulation"):
        raise InputError(f"--formulation: is of policy {CHECKFLOW} alone; leave it out")
    for path in outputs:
        files.check_suffix(path)
    if journal is None and outputs:
        journal = outputs[0].with_suffix(".journal.jsonl")
    devices = (None,) if device is None else list_of(device, str, "--device")
    check_outputs(inputs_of(models, devices), *outputs, appended=[journal] if journal else [])
    grid = Grid(
        models=tuple(dict.fromkeys(models)),
        settings=tuple(
            (name, list_of(value, str, f"--set {name}")) for name, value in settings_of(settings, batch_size).items()
        ),
        devices=devices,
        policies=policies,
        formulations=list_of(formulation, _formulation, "--formulation"),
        chunks_bytes=(None,) if chunk is None else list_of(chunk, lambda text: parse_bytes(text, "--chunk"), "--chunk"),
        slacks_ppm=list_of(slack, _slack, "--slack"),
        intervals=list_of(interval, interval_of, "--interval"),
        bandwidths_bytes_per_s=(
            (None,)
            if bandwidth is None
            else list_of(bandwidth, lambda text: parse_rate(text, "--bandwidth"), "--bandwidth")
        ),
    )
    questions: tuple[Question, ...] = grid.searches(Axis(find), up_to) if find else grid.cells()
    jobs = jobs or len(os.sched_getaffinity(0))
    began = time.monotonic()
    given: list[Given] = []
    try:
        with _console.progress() as progress, closing(answers(questions, jobs, journal, progress)) as coming:
            for each in coming:  # one by one: what came before an interrupt counts
                given.append(each)
    except KeyboardInterrupt as interrupt:
        kept = f"{journal} keeps them, the same command goes on from there" if journal else "give -o or --journal"
        click.echo(f"checkflow: interrupted; {len(given)} of {len(questions)} done: {kept}", err=True)
        return exit_code_of(interrupt)
    found = in_order(questions, given)
    for path in outputs:
        files.write(path, found)
    if as_json:
        click.echo(json.dumps(files.document(found)))
    else:
        reused = sum(each.reused for each in given)
        tables.show(_console.out, found, reused=reused, wall_s=time.monotonic() - began, jobs=jobs)
    return EXIT_NO if any(answer.failed for answer in found) else EXIT_DONE


def _formulation(text: str) -> Formulation:
    try:
        return Formulation(text)
    except ValueError:
        known = ", ".join(Formulation)
        raise InputError(f"--formulation {text}: is not one; choose from {known}") from None


def _slack(text: str) -> int:
    try:
        return fraction_ppm(float(text), "--slack")
    except ValueError:
        raise InputError(f"--slack {text}: is not a number; 0.1 tolerates 10% drift") from None
