"""The operators' DAG is what the operators read and write, its critical path is the longest, and files hold both."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import networkx as nx
import pytest
from drawn import graphs
from handmade import GRAPH
from hypothesis import given

from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE
from checkflow.graph import Graph
from checkflow.graphfile import read_graph, write_graph
from checkflow.report.dagfile import dot
from checkflow.report.operators import critical_path, dag

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
HOSTILE = 'a "b" \\ c; }\n<&>\x07 -> 1\\'
NAMED = replace(
    GRAPH,
    model=HOSTILE,
    ops=(replace(GRAPH.ops[0], name=HOSTILE), *GRAPH.ops[1:]),
    tensors=tuple(replace(tensor, name=f"{tensor.name} {HOSTILE}") for tensor in GRAPH.tensors),
)
CASES = {"handmade": GRAPH, "hostile names": NAMED, "alexnet-1": read_graph(GRAPHS / "alexnet-1.json")}


def _edges(graph: Graph) -> set[tuple[int, int]]:
    """By definition: a later step uses what a step wrote, and none between them wrote it again."""
    found = set()
    for one, other in combinations(range(1, graph.steps + 1), 2):
        used = {*graph.ops[other - 1].reads, *graph.ops[other - 1].writes}
        again = {index for op in graph.ops[one : other - 1] for index in op.writes}
        if (used & set(graph.ops[one - 1].writes)) - again:
            found.add((one, other))
    return found


def _longest_ns(graph: Graph) -> int:
    """By networkx, whose edges have lengths: each that of the operator it leads to."""
    lengths: nx.DiGraph[int] = nx.DiGraph()
    times = {step: op.time_ns for step, op in enumerate(graph.ops, start=1)}
    lengths.add_weighted_edges_from((0, step, time_ns) for step, time_ns in times.items())
    lengths.add_weighted_edges_from((one, other, times[other]) for one, other in _edges(graph))
    return int(nx.dag_longest_path_length(lengths))


def _check_critical_path(graph: Graph) -> None:
    path = critical_path(graph)
    assert path.time_ns == _longest_ns(graph) == sum(graph.ops[step - 1].time_ns for step in path.steps)
    assert set(pairwise(path.steps)) <= _edges(graph)
    assert path.share == path.time_ns / graph.iteration_time_ns


def test_the_handmade_graphs_by_hand() -> None:
    """Steps 1 and 2 share x, steps 3 and 4 share a; a's first writer is step 3, so that nothing joins the pairs."""
    assert set(dag(GRAPH).edges) == {(1, 2), (3, 4)}
    assert dag(GRAPH).edges[1, 2]["storages"] == "x" and dag(GRAPH).edges[3, 4]["size_bytes"] == 100
    longer = replace(GRAPH, ops=(*GRAPH.ops[:2], replace(GRAPH.ops[2], time_ns=11), GRAPH.ops[3]))
    path = critical_path(longer)
    assert (path.steps, path.time_ns, path.share) == ((3, 4), 21, 21 / 41)
    assert path.longest(longer, 1) == [3]


@given(graphs(1))
def test_no_path_is_longer(graph: Graph) -> None:
    """Random graphs: the edges are those of the definition, and networkx finds no longer path."""
    assert set(dag(graph).edges) == _edges(graph)
    _check_critical_path(graph)


def test_no_path_through_a_network_is_longer() -> None:
    _check_critical_path(CASES["alexnet-1"])


def test_without_times_nothing_is_divided() -> None:
    untimed = replace(GRAPH, ops=tuple(replace(op, time_ns=0) for op in GRAPH.ops))
    assert (critical_path(untimed).time_ns, critical_path(untimed).share) == (0, 0.0)
    assert critical_path(replace(GRAPH, ops=())).steps == ()


@pytest.mark.parametrize("case", CASES)
def test_networkx_reads_the_graphml_back(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator, time and edge; and the marked nodes and edges are the critical path."""
    monkeypatch.chdir(tmp_path)
    graph = CASES[case]
    write_graph(Path("mine.graph.json"), graph)
    assert run(["inspect", "mine.graph.json", "--export", "graphml"]) == EXIT_DONE
    read = nx.read_graphml("mine.graphml", node_type=int)
    expected = dag(graph)
    assert set(read.nodes) == set(expected.nodes) and set(read.edges) == set(expected.edges)
    figures = ("time_ns", "flops", "traffic_bytes")
    assert all(read.nodes[step][name] == expected.nodes[step][name] for step in expected for name in figures)
    assert [read.nodes[step]["name"] for step in (2, 3)] == [op.name for op in graph.ops[1:3]]
    assert all(read.edges[edge]["size_bytes"] == expected.edges[edge]["size_bytes"] for edge in expected.edges)
    steps = critical_path(graph).steps
    assert {step for step, op in read.nodes(data=True) if op["critical"]} == set(steps)
    assert {(a, b) for a, b, edge in read.edges(data=True) if edge["critical"]} == set(pairwise(steps))


STRING = r'"(?:[^"\\]|\\.)*"'
NODE = re.compile(rf"  (\d+) \[label={STRING}, time_ns=(\d+)(, style=bold)?\];")
EDGE = re.compile(rf"  (\d+) -> (\d+) \[label={STRING}, size_bytes=(\d+)(, style=bold)?\];")


@pytest.mark.parametrize("case", CASES)
def test_the_dot_file_says_the_same(case: str) -> None:
    """Each line is a node or an edge, whatever names hold; those in bold are the critical path."""
    graph, expected = CASES[case], dag(CASES[case])
    head, shape, *lines, tail = dot(graph).splitlines()
    assert re.fullmatch(rf"digraph {STRING} {{", head) and shape == "  node [shape=box];" and tail == "}"
    nodes, edges = ([match for match in map(kind.fullmatch, lines) if match is not None] for kind in (NODE, EDGE))
    assert len(nodes) + len(edges) == len(lines)
    assert {(int(n[1]), int(n[2])) for n in nodes} == {(s, op["time_ns"]) for s, op in expected.nodes(data=True)}
    assert {(int(e[1]), int(e[2])) for e in edges} == set(expected.edges)
    assert {int(node[1]) for node in nodes if node[3]} == set(critical_path(graph).steps)
    assert {(int(e[1]), int(e[2])) for e in edges if e[4]} == set(pairwise(critical_path(graph).steps))


def test_the_files_name_says_the_format(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """-o alone is enough; --export decides where the name says nothing."""
    source = str(GRAPHS / "alexnet-1.json")
    for arguments, name in ((["-o"], "a.dot"), (["-o"], "a.graphml"), (["--export", "dot", "-o"], "a.gv")):
        assert run(["inspect", source, *arguments, str(tmp_path / name)]) == EXIT_DONE
        assert name in capfd.readouterr().out
    assert (tmp_path / "a.gv").read_text() == (tmp_path / "a.dot").read_text() == dot(CASES["alexnet-1"])
    assert len(nx.read_graphml(tmp_path / "a.graphml")) == CASES["alexnet-1"].steps


WRONG = {
    "an unknown name": (["-o", "a.svg"], "a.svg: its name has to end in .graphml or .dot"),
    "a name that says otherwise": (["--export", "dot", "-o", "a.graphml"], "a.graphml: its name says graphml"),
    "an unknown format": (["--export", "svg"], "--export"),
    "no such folder": (["-o", "/proc/nowhere/a.dot"], "/proc/nowhere/a.dot: cannot be written"),
    "a folder": (["--export", "dot", "-o", "."], "is a directory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_exported_is_said_in_a_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = WRONG[case]
    assert run(["inspect", str(GRAPHS / "alexnet-1.json"), *arguments]) == EXIT_BAD_INPUT
    captured = capfd.readouterr()
    assert expected in captured.err and len(captured.err.splitlines()) == 1 and not captured.out
    assert not list(tmp_path.iterdir())


def test_a_schedule_has_no_operators(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    schedule = GRAPHS.parent / "schedules" / "alexnet-1.json"
    assert run(["inspect", str(schedule), "-o", str(tmp_path / "a.dot")]) == EXIT_BAD_INPUT
    assert "give the graph that it was made from" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_inspect_and_compile_tell_the_critical_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """inspect: its length, its share and its five longest operators, longest first; compile: in one line."""
    monkeypatch.chdir(tmp_path)
    graph = CASES["alexnet-1"]
    path = critical_path(graph)
    assert run(["inspect", str(GRAPHS / "alexnet-1.json"), "--rows", "1"]) == EXIT_DONE
    lines = capfd.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("critical path: ")]
    assert f"{path.share:.0%} of the iteration, through {len(path.steps)} operators" in lines[at]
    assert [int(line.split()[0]) for line in lines[at + 3 : at + 8]] == path.longest(graph, 5)
    assert lines[at + 8] == ""
    assert run(["compile", str(GRAPHS / "alexnet-1.json"), "--bandwidth", "63GB/s", "-o", "s.json"]) == EXIT_DONE
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("critical path ")]
    assert f"{path.share:.0%} of it, through {len(path.steps)} operators" in line
