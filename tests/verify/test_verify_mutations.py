"""verify against a wrong planner: each function of its chain is broken in turn, and no schedule gets through."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
from mutants import ELSEWHERE, MUTANTS, SETTINGS, UNTOUCHED, VALID, Mutant, replaced
from test_verify_executed import executed

import checkflow
from checkflow import compiler
from checkflow.compiler import Compiled, Refused
from checkflow.errors import VerificationError
from checkflow.plan import problem_of
from checkflow.plan.packed import packing
from checkflow.schedule import sealed
from checkflow.verify import verify

PACKAGE = Path(checkflow.__file__).parent
CHAIN = ("graph", "plan", "policies", "lower", "compiler")  # from a graph to its schedule


def compiled(setting: str) -> Compiled | Refused:
    """Compile under whatever is patched; the graph is new, so that no answer of before is kept in it."""
    graph, options, solved = SETTINGS[setting].graph, SETTINGS[setting].options, SETTINGS[setting].solved
    with pytest.MonkeyPatch.context() as patch:
        if solved:
            patch.setattr(packing, "construct", lambda *_: None)
        return compiler.compile_graph(replace(graph), options)


@cache
def sound(setting: str) -> Compiled | Refused:
    """What the planner as it is makes of a setting."""
    return compiled(setting)


@contextmanager
def broken(name: str, mutant: Mutant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        replaced(patch, name, mutant.make)
        yield


def functions() -> set[str]:
    """Every function and method of the chain, by reading its modules: "plan.timeline.grid:Grid.clock"."""
    found = set()
    for part in CHAIN:
        paths = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else (PACKAGE / part).rglob("*.py")
        for path in paths:
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
            if any(module == other or module.startswith(f"{other}.") for other in ELSEWHERE):
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    found.add(f"{module}:{node.name}")
                elif isinstance(node, ast.ClassDef):
                    methods = (one.name for one in node.body if isinstance(one, ast.FunctionDef))
                    found |= {f"{module}:{node.name}.{method}" for method in methods}
    return found


def test_every_function_of_the_planner_is_broken_once() -> None:
    """A new function needs a mutant, or a reason why no schedule's soundness depends on it; a stale entry goes."""
    there = functions()
    tables = set(MUTANTS) | set(VALID) | set(UNTOUCHED)
    assert not there - tables, "functions without a mutant"
    assert not tables - there, "mutants without a function"
    assert all(MUTANTS.values()) and not set(UNTOUCHED) & (set(MUTANTS) | set(VALID))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        pytest.param(name, mutant, id=f"{name}-{number}")
        for name, mutants in MUTANTS.items()
        for number, mutant in enumerate(mutants)
    ],
)
def test_a_schedule_of_a_wrong_planner_is_refused(name: str, mutant: Mutant) -> None:
    """What the planner as it is compiles or refuses is not compiled by a planner with one wrong function."""
    sound(mutant.setting)
    with broken(name, mutant), pytest.raises(mutant.stops) as raised:
        compiled(mutant.setting)
    if mutant.stops is VerificationError:
        assert "\n" not in str(raised.value)


def test_lanes_without_gradients_are_refused() -> None:
    """Where each tensor has rows of the first lane alone, nothing brings them to the iteration of another one."""
    right = sound("base")
    assert isinstance(right, Compiled)
    state = {row.id for row in right.schedule.state}
    kept = tuple(row for row in right.schedule.actions if row.tensor in state and not row.back)
    other = sealed(right.schedule.model_copy(update={"actions": kept, "gradients": ()}))
    with pytest.raises(VerificationError, match="is in one lane of 2, and no gradient"):
        verify(other, right.graph)


def test_what_is_written_again_is_copied_and_not_held() -> None:
    """In what a person is told, and a choice of policies counts."""
    right = sound("in place")
    assert isinstance(right, Compiled)
    schedule, (held, copied) = right.schedule, right.schedule.gradients
    assert held.until is None and copied.until is not None
    snapshots = {
        row: sum(a.bytes for a in schedule.actions if a.snapshot and a.tensor == row) for row in (held.id, copied.id)
    }
    assert all(snapshots.values()) and schedule.held_bytes() == snapshots[held.id]
    assert schedule.copied_bytes() == schedule.certificate.snapshot_bytes - snapshots[held.id]


@pytest.mark.parametrize(("setting", "until"), [("in place", None), ("in place", 11), ("parts", 12)])
def test_until_when_a_gradient_is_there_has_to_be_said(setting: str, until: int | None) -> None:
    """Where training writes the next one in its place, and only there."""
    right = sound(setting)
    assert isinstance(right, Compiled)
    *others, last = right.schedule.gradients
    assert (last.until is not None) == (setting == "in place")
    rows = (*others, last.model_copy(update={"until": until}))
    other = sealed(right.schedule.model_copy(update={"gradients": rows}))
    with pytest.raises(VerificationError, match="does not say until when"):
        verify(other, right.graph)


@pytest.mark.parametrize(("name", "mutant"), [(name, mutant) for name, (mutant, _) in VALID.items()], ids=VALID)
def test_a_schedule_that_differs_and_passes_is_sound(name: str, mutant: Mutant) -> None:
    """What such a planner compiles is another schedule, and a link played event by event finds it sound, too."""
    right = sound(mutant.setting)
    with broken(name, mutant):
        other = compiled(mutant.setting)
    assert isinstance(right, Compiled) and isinstance(other, Compiled)
    assert other.schedule.digest != right.schedule.digest
    claims = other.schedule.certificate
    options = SETTINGS[mutant.setting].options
    problem = problem_of(
        other.graph,
        bandwidth_bytes_per_s=options.bandwidth_bytes_per_s,
        interval=options.interval or 1,
        chunk_bytes=options.chunk_bytes,
        slack_ppm=options.slack_ppm,
    )
    assert executed(other.schedule, problem) == (claims.peak_bytes, claims.snapshot_bytes)


@pytest.mark.parametrize("setting", [one for one in SETTINGS if one != "too slow" and "over the limit" not in one])
def test_no_function_of_the_planner_runs_in_verify(setting: str) -> None:
    """verify reads fields: of the package only its own functions run, and those that read and digest files."""
    made = sound(setting)
    assert isinstance(made, Compiled)
    graph, ran = replace(made.graph), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            ran.add(f"{path.relative_to(PACKAGE).parts[0].removesuffix('.py')}.{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        verify(made.schedule, graph)
    finally:
        sys.setprofile(before)
    foreign = {one for one in ran if one.split(".")[0] not in ("verify", "schedule", "graphfile", "jsonfile")}
    assert not foreign - {"graph.Role.is_state"}  # in the state's digest; verify has a list of its own
