"""The operators' DAG as a file for other tools: GraphML (networkx, yEd, Gephi) or DOT (Graphviz)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import networkx as nx

from checkflow.graph import Graph
from checkflow.report.operators import critical_path, dag
from checkflow.text import plain
from checkflow.units import format_ns


def graphml(graph: Graph) -> str:
    """Nodes are steps, with their times; edges say which storages are handed on; `critical` marks the longest path."""
    return "\n".join(nx.generate_graphml(_named(graph))) + "\n"


def dot(graph: Graph) -> str:
    """The same for a picture, the critical path in bold."""
    found = _named(graph)
    lines = [f"digraph {_quoted(graph.model)} {{", "  node [shape=box];"]
    for step, op in found.nodes(data=True):
        label = f"{step} {op['name']}, {format_ns(op['time_ns'])}"
        lines.append(f"  {step} [label={_quoted(label)}, time_ns={op['time_ns']}{_bold(op)}];")
    for source, step, edge in found.edges(data=True):
        label = f"label={_quoted(edge['storages'])}, size_bytes={edge['size_bytes']}"
        lines.append(f"  {source} -> {step} [{label}{_bold(edge)}];")
    return "\n".join((*lines, "}")) + "\n"


FORMATS: dict[str, Callable[[Graph], str]] = {"graphml": graphml, "dot": dot}


def _named(graph: Graph) -> nx.DiGraph[int]:
    """The DAG with its critical path marked, and with names that any file can hold: a control character is no XML."""
    found, path = dag(graph), critical_path(graph).steps
    steps, edges = set(path), set(pairwise(path))
    found.graph = {name: plain(value) for name, value in found.graph.items()}
    for step, op in found.nodes(data=True):
        op.update(name=plain(op["name"]), critical=step in steps)
    for source, step, edge in found.edges(data=True):
        edge.update(storages=plain(edge["storages"]), critical=(source, step) in edges)
    return found


def _bold(attributes: dict[str, object]) -> str:
    return ", style=bold" if attributes["critical"] else ""


def _quoted(text: str) -> str:
    backslash = "\\"
    return '"' + plain(text).replace(backslash, 2 * backslash).replace('"', backslash + '"') + '"'
