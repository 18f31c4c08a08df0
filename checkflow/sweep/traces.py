"""A model's graph, traced once, and the user's files that made it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from checkflow import models, sources
from checkflow.graph import Graph
from checkflow.graphfile import read_graph

Settings = tuple[tuple[str, str], ...]
Files = tuple[tuple[str, str], ...]  # absolute path and SHA-256, sorted


@dataclass(frozen=True)
class TracedModel:
    graph: Graph
    files: Files  # the model's own file and what it imported of the user's; none for a bundled model


def is_graph(model: str) -> bool:
    """Whether MODEL is a graph that `checkflow trace` wrote."""
    return model.endswith(".json")


def file_of(model: str) -> Path | None:
    """The absolute path of a user's model; None for a bundled one."""
    if model in models.NAMES:
        return None
    path = Path(model) if sources.is_file(model) else Path(model.rpartition(":")[0])
    return path.resolve()


def digest(path: Path) -> str:
    """SHA-256 of a file; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def trace(model: str, settings: Settings) -> TracedModel:
    """Trace a model, or read its graph. Raises as sources.load, trace_training and read_graph do."""
    path = file_of(model)
    own = {} if path is None else {str(path): digest(path)}
    if is_graph(model):
        return TracedModel(read_graph(Path(model)), tuple(own.items()))
    from checkflow.trace import trace_training  # imports torch, which graphs do without

    with sources.users_modules() as imported:
        source = sources.load(model, dict(settings))
        result = trace_training(source.factory, model=source.name, arguments=source.arguments)
    files = {str(found): digest(found) for found in imported} | own
    return TracedModel(result.graph, tuple(sorted(files.items())))
