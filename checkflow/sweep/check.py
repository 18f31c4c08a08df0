"""What is wrong with a sweep and can be told before any work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from checkflow import hardware, policies, sources
from checkflow.compiler import check_interval
from checkflow.errors import InputError
from checkflow.graphfile import read_graph
from checkflow.sweep.cells import BATCH_SIZE, Axis, Question, Search, cell_of
from checkflow.sweep.isolated import isolated
from checkflow.sweep.traces import Settings, is_graph

DEFAULT_DEVICE = "rtx3090"
MEASURE = "measure"


def check(questions: Iterable[Question]) -> dict[Question, hardware.Profile | None]:
    """The device profile of each question; None where a graph was measured on a device that is not known.

    Raises InputError for a model, factory argument, device, policy or search that is wrong.
    """
    load_profile = cache(hardware.load_profile)
    device_of_graph = cache(_device_of_graph)
    check_model = cache(_check_model)
    profiles: dict[Question, hardware.Profile | None] = {}
    for question in questions:
        cell = cell_of(question)
        if cell.policy not in policies.names():
            policies.load(cell.policy)  # raises, and names those there are
        check_interval(cell.interval)
        if isinstance(question, Search):
            _check_search(question)
        batch = ((BATCH_SIZE, "1"),) if isinstance(question, Search) and question.axis is Axis.BATCH_SIZE else ()
        check_model(cell.model, cell.settings + batch)
        if cell.device == MEASURE:
            raise InputError(
                "--device measure: would time the sweep's own processes; give the file that `checkflow profile` "
                "writes, or graphs that `checkflow trace --device measure` writes"
            )
        device = cell.device or (device_of_graph(cell.model) if is_graph(cell.model) else DEFAULT_DEVICE)
        known = cell.device is not None or device in hardware.NAMES
        profiles[question] = load_profile(device) if known else None
        searched = isinstance(question, Search) and question.axis is Axis.BANDWIDTH
        if not known and cell.bandwidth_bytes_per_s is None and not searched:
            raise InputError(f"--bandwidth: the link of {device!r} ({cell.model}) is not known; give it, like 63GB/s")
    return profiles


def _device_of_graph(model: str) -> str:
    graph = read_graph(Path(model))
    if graph.iteration_time_ns <= 0:
        raise InputError(f"{model}: its operators take no time; trace it with --device, or give --device here")
    return graph.device


def _check_model(model: str, settings: Settings) -> None:
    if is_graph(model):
        if settings:
            raise InputError(f"{model}: is a traced graph; --set and --batch-size need a model")
        read_graph(Path(model))
        return
    isolated(lambda: _load(model, settings), model)


def _load(model: str, settings: Settings) -> None:
    with sources.kept_from_stdout():
        sources.load(model, dict(settings))


def _check_search(search: Search) -> None:
    """What is looked for is left out, and something has to be left to be found."""
    cell, axis = search.cell, search.axis
    given = {
        Axis.BANDWIDTH: cell.bandwidth_bytes_per_s is not None,
        Axis.INTERVAL: cell.interval != 1,
        Axis.BATCH_SIZE: BATCH_SIZE in dict(cell.settings),
    }
    if given[axis]:
        raise InputError(f"--{axis.replace('_', '-')}: is what --find {axis} looks for; leave it out")
    if cell.interval is None:
        raise InputError(f"--interval auto: any {axis} would do with some interval; give a number, or --find interval")
