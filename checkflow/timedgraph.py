"""MODEL -> Graph with times: a traced graph's file as it is, anything else by tracing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkflow import hardware, sources, trace, workdir
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.hardware.measure import measure_copies
from checkflow.spelling import option, setting
from checkflow.state.refused import check_training
from checkflow.training import Training
from checkflow.unlisted import lines_of

MEASURE = "measure"
DEFAULT_DEVICE = "rtx3090"

Model = str | Path | Graph | Training | Callable[..., Training]  # what MODEL may be


@dataclass(frozen=True)
class TimedGraph:
    graph: Graph
    device: hardware.Profile | hardware.CopyRates | None  # None: the graph was measured elsewhere
    notes: tuple[str, ...]
    trace_s: float

    def bandwidth_bytes_per_s(self, asked: int | None) -> int:
        """Of the link: as asked, or the device's. Raises InputError where neither is known."""
        if asked is not None:
            return asked
        if self.device is None:
            raise InputError(
                f"{option('bandwidth')}: the link of {self.graph.device!r} is not known; give it, like 63GB/s"
            )
        if isinstance(self.device, hardware.CopyRates):
            return self.device.link_bytes_per_s
        return hardware.link_bytes_per_s(self.device, self.graph.world_size)

    def copy_ns(self, size_bytes: int) -> int | None:
        """What copies within the device's memory take; None where the device is not known."""
        return None if self.device is None else hardware.copy_ns(size_bytes, self.device)

    def host_ns(self, size_bytes: int) -> int | None:
        """What the host takes to update so many bytes of a replica; None where its memory is not known."""
        return hardware.host_update_ns(size_bytes, self.device) if isinstance(self.device, hardware.Profile) else None

    def mirror_ns(self, size_bytes: int) -> int | None:
        """What sending so many bytes to another machine takes; None where there is no other, or that is not known."""
        if not isinstance(self.device, hardware.Profile):
            return None
        return hardware.mirror_ns(size_bytes, self.device, self.graph.world_size)


def traced(
    model: Model,
    settings: Mapping[str, object],
    device: str | None,
    *,
    real: bool,
    world: trace.World | None = None,
    progress: Callable[[str], None],
) -> TimedGraph:
    """Trace MODEL (or read its graph) and give its operators their times on a device; of a `world`, as on that rank.

    Raises as sources.load, trace_training and hardware.load_profile do.
    """
    started = time.perf_counter()
    if isinstance(model, Path):
        model = str(model)
    if isinstance(model, Graph) or (isinstance(model, str) and _is_json(model)):
        name = model.model if isinstance(model, Graph) else model
        if settings or device == MEASURE or real or world is not None:
            raise InputError(
                f"{name}: is a traced graph; {setting()}, {option('real', True)}, {option('world_size')} and "
                f"{option('device', MEASURE)} need a model"
            )
        return _as_read(model if isinstance(model, Graph) else read_graph(Path(model)), device, started)
    if isinstance(model, Training):
        if world is not None:
            raise InputError(
                f"{option('world_size')}: a Training that is there is one process's; give the function that makes it"
            )
        return _as_recorded(model, settings, device, progress)
    profile = None if device == MEASURE else hardware.load_profile(device or DEFAULT_DEVICE)
    if world is not None:
        if profile is None:
            raise InputError(
                f"{option('device', MEASURE)}: of ranks only one is here; give a profile with a network, like h100"
            )
        hardware.link_bytes_per_s(profile, world.size)  # before anything is traced
    with trace.in_place_of(world), sources.users_modules():
        source = sources.load(model, settings) if isinstance(model, str) else sources.of(model, settings)
        result = trace.trace_training(
            source.factory,
            model=source.name,
            arguments=source.arguments,
            real=real,
            measure=device == MEASURE,
            world=world,
            progress=progress,
        )
    if profile is None:
        return _measured(result.graph, result.notes, started, progress)
    graph = hardware.retime(result.graph, profile)
    return TimedGraph(graph, profile, (*result.notes, *_unlisted(graph)), time.perf_counter() - started)


def _is_json(model: str) -> bool:
    """Whatever its name ends in: no Python begins so that makes a training."""
    if model.endswith(".json"):
        return True
    try:
        with Path(model).open("rb") as file:
            return not model.endswith(".ipynb") and file.read(1) == b"{"
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return False


def _as_recorded(
    training: Training, settings: Mapping[str, object], device: str | None, progress: Callable[[str], None]
) -> TimedGraph:
    """A training that is there, on its own tensors, with the times that it took or those of the device asked for."""
    if settings:
        raise InputError("arguments: a Training takes none; give the function that makes it")
    started = time.perf_counter()
    progress("running three iterations, recording the last")
    with workdir.kept():
        graph = trace.recorded(check_training(training, "training"), "training")
    if device is None or device == MEASURE:
        return _measured(graph, (), started, progress)
    profile = hardware.load_profile(device)
    graph = hardware.retime(graph, profile)
    return TimedGraph(graph, profile, _unlisted(graph), time.perf_counter() - started)


def _measured(graph: Graph, notes: tuple[str, ...], started: float, progress: Callable[[str], None]) -> TimedGraph:
    """Its operators' times are what they took here."""
    copies = measure_copies(graph.traced_on, progress)
    return TimedGraph(graph, copies, (*notes, *_unlisted(graph)), time.perf_counter() - started)


def _as_read(graph: Graph, device: str | None, started: float) -> TimedGraph:
    """A graph with its own times, or with those of the device that is asked for."""
    profile = None
    if device is not None:
        profile = hardware.load_profile(device)
        graph = hardware.retime(graph, profile)
    elif graph.device in hardware.NAMES:
        profile = hardware.load_profile(graph.device)
    return TimedGraph(graph, profile, _unlisted(graph), time.perf_counter() - started)


def _unlisted(graph: Graph) -> tuple[str, ...]:
    """A GradScaler is given at attach, which says so where it was not."""
    found = [one for one in graph.unlisted if not one.scaler]
    return lines_of(found, "list it in Training(extra={...}) and attach(extra={...})")
