"""checkflow simulate: failures against policies, from one device to many."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import click

from checkflow.cli import _console
from checkflow.cli._options import (
    Duration,
    GivenPath,
    OutputPath,
    Rate,
    Share,
    Size,
    json_option,
    list_of,
    positive_of,
    was_given,
)
from checkflow.errors import EXIT_DONE, InputError
from checkflow.jsonfile import check_outputs
from checkflow.report import waste
from checkflow.report.trials import DAY_NS, Trials, document_of, lines_of, table_of
from checkflow.schedule import read_schedule
from checkflow.simulation.costs import Costs, costs_at, costs_of
from checkflow.simulation.failures import run
from checkflow.simulation.incidents import exponential, read_incidents
from checkflow.units import parse_ns

MOST_DEVICES, MOST_DAYS = 10**7, 36_500


@click.command()
@click.argument("schedules", metavar="[SCHEDULE]...", nargs=-1, type=GivenPath(path_type=Path))
@click.option("--mtbf", metavar="TIME,...", help="Mean time between failures of one device: 1000h,5000h.")
@click.option("--failures", type=GivenPath(path_type=Path), help="A CSV file of what failed when, instead of --mtbf.")
@click.option("--devices", default="1", show_default=True, metavar="N,A..B,...",
              help="A..B doubles from A on; any device's failure stops all.")  # fmt: skip
@click.option("--lost-machines", type=Share(), default=0.5, show_default=True,
              help="Share of the failures that take host memory along; the others kill a trainer.")  # fmt: skip
@click.option("--days", type=float, default=30.0, show_default=True)
@click.option("--disk", type=Rate(), default="2GB/s", show_default=True, help="What a device's share of it writes.")
@click.option("--persist-every", default="auto", show_default=True, metavar="TIME|auto",
              help="Least time between two writes; 0s is back to back, auto as often as costs nothing.")  # fmt: skip
@click.option("--restart", type=Duration(), default="30s", show_default=True, help="Of a killed trainer.")
@click.option("--replace", "replacing", type=Duration(), default="5min", show_default=True, help="Of a lost machine.")
@click.option("--seeds", type=click.IntRange(min=1), default=20, show_default=True, help="Runs for each line.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first run.")
@click.option("--iteration", type=Duration(positive=True), help="Without a SCHEDULE: what an iteration takes.")
@click.option("--state", type=Size(), help="Without a SCHEDULE: of one device.")
@click.option("--bandwidth", type=Rate(), help="Without a SCHEDULE: of the link to the host.")
@click.option("--interval", metavar="N,...", help="Without a SCHEDULE: iterations between checkpoints  [default: 1]")
@click.option("--stall", type=Duration(), help="Without a SCHEDULE: of training, for a checkpoint  [default: 0s]")
@click.option("--figure", type=OutputPath(), help="Draw the time wasted, .png or .svg.")
@json_option
def command(
    schedules: tuple[Path, ...],
    mtbf: str | None,
    failures: Path | None,
    devices: str,
    lost_machines: float,
    days: float,
    disk: int,
    persist_every: str,
    restart: int,
    replacing: int,
    seeds: int,
    seed: int,
    iteration: int | None,
    state: int | None,
    bandwidth: int | None,
    interval: str | None,
    stall: int | None,
    figure: Path | None,
    as_json: bool,
) -> int:
    """What failures cost under each SCHEDULE's policy: time that is lost, waited for and done again.

    Failures are exponential with the mean that --mtbf says, or those of a file. A run lasts --days, or 20,000 failures.
    """
    if figure is not None:
        waste.check(figure)
        check_outputs([*schedules, *([failures] if failures else [])], figure)
    if figure is not None and mtbf is None:
        raise InputError("--figure: has the mean time between failures as its axis; give --mtbf")
    if (mtbf is None) == (failures is None):
        raise InputError("--mtbf, --failures: give one of them; --mtbf 1000h is the mean of one device")
    if failures is not None and was_given("devices", "lost_machines", "seeds", "seed"):
        raise InputError("--devices, --lost-machines, --seeds, --seed: --failures says what fails; leave it out")
    if not 0 < days <= MOST_DAYS:
        raise InputError(f"--days {days}: is not above 0 and up to {MOST_DAYS}; write it like 30")
    span_ns = max(1, round(days * DAY_NS))
    gap = None if persist_every == "auto" else parse_ns(persist_every, "--persist-every")
    if schedules:
        if any(value is not None for value in (iteration, state, bandwidth, interval, stall)):
            raise InputError("--iteration, --state, --bandwidth, --interval, --stall: a SCHEDULE says it; leave it out")
        found = [
            costs_of(read_schedule(path), disk, persist_gap_ns=gap, restart_ns=restart, replace_ns=replacing)
            for path in schedules
        ]
        policies = [replace(costs, name=name) for costs, name in zip(found, _names(schedules, found), strict=True)]
    else:
        if iteration is None or state is None or bandwidth is None:
            raise InputError("SCHEDULE: none is given; give one, or --iteration, --state and --bandwidth")
        policies = [
            costs_at(
                f"every {each}",
                iteration,
                each,
                state,
                bandwidth,
                disk,
                stall_ns=stall or 0,
                persist_gap_ns=gap,
                restart_ns=restart,
                replace_ns=replacing,
            )
            for each in list_of("1" if interval is None else interval, partial(positive_of, "--interval"), "--interval")
        ]
    counts = _devices(devices)
    means = () if mtbf is None else list_of(mtbf, _mean, "--mtbf")
    incidents = () if failures is None else read_incidents(failures)
    cells: list[Trials] = []
    with _console.progress() as progress:
        if failures is not None:
            cells = [Trials(costs, 1, None, (run(costs, incidents, span_ns),)) for costs in policies]
        for mean_ns, count, costs in product(means, counts, policies):
            progress(f"{len(cells)} of {len(means) * len(counts) * len(policies)} simulated")
            drawn = (exponential(mean_ns / count, lost_machines, seed + number) for number in range(seeds))
            cells.append(Trials(costs, count, mean_ns, tuple(run(costs, each, span_ns) for each in drawn)))
    if figure is not None:
        waste.write(figure, lines_of(cells), "Time wasted on stalls, restarts and iterations done again")
    if as_json:
        click.echo(json.dumps({"cells": [document_of(cell) for cell in cells]}))
    else:
        _console.out.print(table_of(cells))
    return EXIT_DONE


def _names(paths: tuple[Path, ...], policies: list[Costs]) -> list[str]:
    """A policy and its interval, with the file's name where two would read the same."""
    names = [f"{costs.name}, every {costs.interval}" for costs in policies]
    stems = [f"{path.stem}: {name}" for path, name in zip(paths, names, strict=True)]
    if len(set(names)) == len(names):
        return names
    if len(set(stems)) == len(stems):
        return stems
    raise InputError(f"{paths[-1]}: schedules of one name and policy; give each once, or rename one")


def _mean(text: str) -> int:
    mean_ns = parse_ns(text, "--mtbf")
    if mean_ns < 1:
        raise InputError(f"--mtbf {text}: is not positive; write it like 1000h")
    return mean_ns


def _devices(text: str) -> tuple[int, ...]:
    """ "1..16" -> (1, 2, 4, 8, 16)."""
    found: list[int] = []
    for part in list_of(text, str, "--devices"):
        low, dots, high = part.partition("..")
        if dots and not (low and high):
            raise InputError(f"--devices {part}: a range lacks an end; write it like 1..16384")
        first, last = (positive_of("--devices", end) for end in (low, high if dots else low))
        if last < first or last > MOST_DEVICES:
            raise InputError(f"--devices {part}: give a range that ascends, up to {MOST_DEVICES}, like 1..16384")
        while first < last:
            found.append(first)
            first *= 2
        found.append(last)
    return tuple(dict.fromkeys(found))
