"""checkflow compile: a training script to a proven schedule."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from checkflow import policies
from checkflow.cli import _console
from checkflow.cli._options import (
    Duration,
    OutputPath,
    Rate,
    Share,
    Size,
    default_output,
    interval_of,
    json_option,
    model_options,
    ranks_options,
    settings_of,
    trace_options,
)
from checkflow.compiler import AUTO, CHECKFLOW, Options, Refused
from checkflow.errors import EXIT_DONE, EXIT_NO, InputError
from checkflow.frontend import check_options, compile_model, refusal, surroundings
from checkflow.jsonfile import check_output, check_outputs
from checkflow.plan import Formulation, Transfers
from checkflow.plan.packed.program import solvers
from checkflow.plan.solve import transfers_for
from checkflow.report import choices, figure, perfetto, summary, terminal
from checkflow.schedule import write_schedule
from checkflow.sources import inputs_of, kept_from_stdout
from checkflow.trace import world_of
from checkflow.units import fraction_ppm


@click.command()
@model_options
@trace_options
@ranks_options
@click.option("-o", "--output", type=OutputPath(), help="Schedule to write  [default: MODEL.schedule.json]")
@click.option("--bandwidth", type=Rate(), help="Of the link to the host  [default: the device's]")
@click.option("--memory-limit", type=Size(), help="Largest peak that is allowed.")
@click.option("--relax-memory", is_flag=True, help="Raise the memory limit by 5% until a plan keeps to it.")
@click.option("--chunk", type=Size(), help="Largest chunk  [default: as large as the plan allows]")
@click.option("--interval", default="auto", show_default=True, metavar="N|auto",
              help="Iterations between checkpoints; auto: the fewest that the link allows; --divided: 1.")  # fmt: skip
@click.option("--slack", type=float, default=0.0, show_default=True, help="Drift of times and bandwidth to tolerate.")
@click.option("--policy", type=click.Choice((*policies.names(), AUTO)), default=CHECKFLOW, show_default=True,
              help="Whose rule places the copies; auto: whoever wastes least time amid failures.")  # fmt: skip
@click.option(
    "--lanes", type=int, metavar="K", help="Of rolling, lowdiff: parts, one an iteration  [default: the least]"
)
@click.option("--no-factors", is_flag=True,
              help="Of rolling, lowdiff, gockpt: no gradient leaves as what it is the product of.")  # fmt: skip
@click.option(
    "--mtbf", type=Duration(positive=True), help="With auto: mean time between failures, of all devices together."
)
@click.option("--disk", type=Rate(), help="With auto: what a device's share of it writes  [default: 2GB/s]")
@click.option("--lost-machines", type=Share(),
              help="With auto: share of the failures that take host memory along  [default: 0.5]")  # fmt: skip
@click.option("--host-memory", type=Size(), help="With auto: the most that checkpoints may take there.")
@click.option("--approximate", is_flag=True,
              help="With auto: updates that the host makes, too, need not be the training's to the bit.")  # fmt: skip
@click.option("--formulation", type=click.Choice([f.value for f in Formulation]), default="direct", show_default=True)
@click.option(
    "--transfers", type=click.Choice([t.value for t in Transfers]), help="[default: streaming for direct, else packed]"
)
@click.option("--solver", type=click.Choice(("auto", *solvers())), default="auto", show_default=True)
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True,
              help="Seconds for the solver, each time it is asked.")  # fmt: skip
@click.option("--report", type=OutputPath(), help="Timeline as a standalone .html or a .png.")
@click.option("--trace-out", type=OutputPath(), help="Timeline for Chrome's tracing or Perfetto (JSON).")
@json_option
def command(
    model: str,
    settings: tuple[str, ...],
    batch_size: str | None,
    device: str | None,
    real: bool,
    world_size: int | None,
    rank: int | None,
    divided: bool,
    output: Path | None,
    bandwidth: int | None,
    memory_limit: int | None,
    relax_memory: bool,
    chunk: int | None,
    interval: str,
    slack: float,
    policy: str,
    lanes: int | None,
    no_factors: bool,
    mtbf: int | None,
    disk: int | None,
    lost_machines: float | None,
    host_memory: int | None,
    approximate: bool,
    formulation: str,
    transfers: str | None,
    solver: str,
    time_limit: float,
    report: Path | None,
    trace_out: Path | None,
    as_json: bool,
) -> int:
    """Trace MODEL's training iteration and plan when each byte of its state is checkpointed.

    MODEL is a file that defines training() -> checkflow.Training (model.py, or model.py:factory), the name of a bundled
    network, or a graph that `checkflow trace` wrote.
    """
    kind = transfers_for(Formulation(formulation), Transfers(transfers) if transfers else None)
    if math.isnan(time_limit):
        raise InputError("--time-limit nan: is no number of seconds; write it like 300")
    options = partial(
        Options,
        interval=interval_of(interval),
        chunk_bytes=chunk,
        memory_limit_bytes=memory_limit,
        relax_memory=relax_memory,
        slack_ppm=fraction_ppm(slack, "--slack"),
        policy=CHECKFLOW if policy == AUTO else policy,
        lanes=lanes,
        factors=not no_factors,
        formulation=Formulation(formulation),
        transfers=kind,
        solver=solver,
        time_limit_s=time_limit,
    )
    world = world_of(world_size, rank, divided=divided, entries_stay=policies.sends_gradients(options(1).policy))
    check_options(options(1), policy, world)
    amid = surroundings(
        policy,
        mtbf_ns=mtbf,
        disk_bytes_per_s=disk,
        lost_machines=lost_machines,
        host_memory_bytes=host_memory,
        approximate=approximate or None,
    )
    output = output or default_output(model, "schedule")
    if report is not None:
        figure.check(report)
    if trace_out is not None:
        check_output(trace_out, (".json",))
    also = [path for path in (report, trace_out) if path is not None]
    check_outputs(inputs_of([model], [device]), output, *also)
    with _console.progress() as progress:
        with kept_from_stdout():
            outcome = compile_model(
                model,
                settings_of(settings, batch_size),
                device=device,
                real=real,
                world=world,
                bandwidth_bytes_per_s=bandwidth,
                options=options,
                amid=amid,
                progress=progress,
            )
        timed, result = outcome.timed, outcome.result
        if not isinstance(result, Refused):
            progress("writing")
            write_schedule(output, result.schedule)
            try:
                if report is not None:
                    figure.write(report, result)
                if trace_out is not None:
                    perfetto.write(trace_out, result)
            except InputError as error:
                raise InputError(f"{error}; the schedule is written: {output}") from None
    if isinstance(result, Refused):
        if as_json:
            click.echo(json.dumps(summary.of_refused(result, outcome.options, timed.trace_s)))
        click.echo(f"checkflow: {refusal(timed.graph.model, result)}", err=True)
        return EXIT_NO
    if as_json:
        found: dict[str, object] = {"unlisted": [asdict(one) for one in result.graph.unlisted]}
        found["mirror_ns"] = timed.mirror_ns(result.schedule.sent_bytes())
        if outcome.comparison is not None:
            found["choice"] = choices.document_of(outcome.comparison)
        click.echo(json.dumps(summary.of_compiled(result, timed.trace_s, str(output)) | found))
    else:
        terminal.show(
            _console.out,
            result,
            notes=timed.notes,
            memory_bytes=timed.device.memory_bytes if timed.device else None,
            snapshot_ns=timed.copy_ns(result.schedule.copied_bytes()),
            mirror_ns=timed.mirror_ns(result.schedule.sent_bytes()),
            trace_s=timed.trace_s,
        )
        if outcome.comparison is not None:
            _console.say()
            _console.out.print(choices.table_of(outcome.comparison))
        _console.say()
        _console.say(f"schedule: {output}")
    return EXIT_DONE
