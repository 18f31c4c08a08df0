"""checkflow trace: a training script to a graph file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from checkflow import policies
from checkflow.cli import _console
from checkflow.cli._options import (
    OutputPath,
    default_output,
    json_option,
    model_options,
    ranks_options,
    settings_of,
    trace_options,
)
from checkflow.compiler import check_ranks
from checkflow.errors import EXIT_DONE, InputError
from checkflow.graphfile import write_graph
from checkflow.jsonfile import check_outputs
from checkflow.sources import inputs_of, kept_from_stdout
from checkflow.timedgraph import traced
from checkflow.trace import world_of
from checkflow.units import format_bytes, format_ns


@click.command()
@model_options
@trace_options
@ranks_options
@click.option("--policy", type=click.Choice(policies.names()),
              help="With --divided, by which the graph is to be compiled: of one that sends gradients along, what "
              "optimizers keep of a parameter stays with it.")  # fmt: skip
@click.option("-o", "--output", type=OutputPath(), help="Graph to write  [default: MODEL.graph.json]")
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
    policy: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Trace MODEL's training iteration: operators, storages, lifetimes, times and anchors, as a graph file."""
    if policy is not None:
        if not divided:
            raise InputError(f"--policy {policy}: is for --divided; leave it out, and give it to compile")
        check_ranks(policy, world_size or 1, divided=divided)
    entries_stay = policy is not None and policies.sends_gradients(policy)
    world = world_of(world_size, rank, divided=divided, entries_stay=entries_stay)
    output = output or default_output(model, "graph")
    check_outputs(inputs_of([model], [device]), output)
    with _console.progress() as progress:
        with kept_from_stdout():
            timed = traced(
                model,
                settings_of(settings, batch_size),
                device,
                real=real,
                world=world,
                progress=progress,
            )
        progress("writing")
        write_graph(output, timed.graph)
    graph = timed.graph
    if as_json:
        figures = {
            "model": graph.model,
            "device": graph.device,
            "steps": graph.steps,
            "tensors": len(graph.tensors),
            "anchors": len(graph.anchors),
            "iteration_time_ns": graph.iteration_time_ns,
            "training_peak_bytes": graph.training_peak_bytes,
            "liveness_peak_bytes": max(graph.liveness_bytes, default=0),
            "unlisted": [asdict(found) for found in graph.unlisted],
            "trace_s": timed.trace_s,
            "graph": str(output),
        }
        click.echo(json.dumps(figures))
        return EXIT_DONE
    for note in timed.notes:
        _console.say(f"note: {note}")
    _console.say(
        f"{graph.model}: {graph.steps} operators, {len(graph.tensors)} storages, {len(graph.anchors)} anchors; "
        f"iteration {format_ns(graph.iteration_time_ns)} on {graph.device}; "
        f"peak {format_bytes(graph.training_peak_bytes)} "
        f"({format_bytes(max(graph.liveness_bytes, default=0))} if freed after the last use); traced in "
        f"{timed.trace_s:.1f} s"
    )
    _console.say()
    _console.say(f"graph: {output}")
    return EXIT_DONE
