"""A planner with one wrong function: what each function of the chain from graph to schedule may get wrong.

A mutant replaces one function everywhere in the package. MUTANTS has those whose schedules verify has to refuse, VALID
those whose schedules differ and are as sound, UNTOUCHED the functions on which no schedule's soundness depends.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from checkflow.compiler import Options
from checkflow.errors import SolverError, VerificationError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.plan import Formulation, Transfers
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.schedule import sealed

KIB = 1024
MIB_TICKS = KIB * KIB * 10**9
Function = Callable[..., Any]


def _graph(*writes: tuple[int, ...]) -> Graph:
    """Steps of 10,240 ns, so that 4 GB/s are 40 KiB a step; hooks at positions 0, 2, 4 and the end."""
    steps = len(writes)
    sizes = (("a", 100, Role.PARAMETER), ("b", 150, Role.BUFFER), ("c", 50, Role.OPTIMIZER), ("d", 64, Role.PARAMETER))
    state = tuple(
        Tensor(f"model/{name}", role, size * KIB, 0, steps, (View(f"model/{name}", "uint8", (size * KIB,)),))
        for name, size, role in sizes
    )
    others = (
        Tensor("x", Role.ACTIVATION, 200 * KIB, 1, 2),
        Tensor("y", Role.GRADIENT, 300 * KIB, 3, 3),
        Tensor("z", Role.ACTIVATION, 150 * KIB, 4, 5),
    )
    return Graph(
        model="mutants",
        arguments=(),
        device="paper",
        traced_on="cpu",
        ops=tuple(Op("op", (), indices, 0, 0, "float32", 10 * KIB) for indices in writes),
        tensors=(*state, *others),
        anchors=(
            *(Anchor(AnchorKind.FORWARD, "model", n, p) for n, p in enumerate((0, 2, 4), start=1)),
            Anchor(AnchorKind.ITERATION_END, "", 1, steps),
        ),
    )


def _parts(*, in_place: bool = False) -> Graph:
    """Two updates, from positions 9 and 11 on: of a with what is kept of it, then of b, and of d, which both write.

    `in_place`: the gradient of b is where the next one will be. It is copied there in step 6, and zeroed in step 13.
    """

    def of(name: str, kib: int, kept: int = 0) -> list[Tensor]:
        found = [Tensor(f"model/{name}", Role.PARAMETER, kib * KIB, 0, 13, _view(f"model/{name}", kib))]
        for entry in range(kept):
            view = _view(f"optimizer/{name}.{entry}", kib)
            found.append(Tensor(view[0].name, Role.OPTIMIZER, kib * KIB, 0, 13, view, f"model/{name}"))
        return found

    state = (*of("a", 90, 2), *of("b", 60, 2), *of("d", 100, 2))
    buffer = Tensor("model/c", Role.BUFFER, 10 * KIB, 0, 13, _view("model/c", 10))
    gradients = (
        Tensor("ga", Role.GRADIENT, 90 * KIB, 5, 11, (), "model/a"),
        Tensor("gb", Role.GRADIENT, 60 * KIB, 6, 13, (), "model/b"),
        Tensor("gd", Role.GRADIENT, 100 * KIB, 6, 13, (), "model/d"),
        Tensor("before", Role.GRADIENT, 60 * KIB, 0, 1, (), "model/b"),
    )
    if in_place:
        copied = Tensor("copied", Role.GRADIENT, 60 * KIB, 4, 6, (), "model/b")
        gradients = (gradients[0], replace(gradients[1], born=0), gradients[2], copied)
    writes: tuple[tuple[int, ...], ...] = (
        (9,), (), (), (), (10,), (11, 12), (10,), (), (), (0, 1, 2, 6, 7, 8), (0,), (3, 4, 5, 6, 7, 8), (),
    )  # fmt: skip
    if in_place:
        writes = (*writes[:3], (13,), *writes[4:12], (11,))
    hooks = [
        (AnchorKind.OPTIMIZER_PRE if position in (9, 11) else AnchorKind.FORWARD, position) for position in range(12)
    ]
    graph = Graph(
        model="parts",
        arguments=(),
        device="paper",
        traced_on="cpu",
        ops=tuple(Op("op", (), indices, 0, 0, "float32", 10 * KIB) for indices in writes),
        tensors=(*state, buffer, *gradients),
        anchors=(
            *(Anchor(kind, f"at {position}", 1, position) for kind, position in hooks),
            Anchor(AnchorKind.ITERATION_END, "", 1, 13),
        ),
    )
    resident = graph.resident_bytes  # the same at each step, so that whatever is held is seen
    filled = (max(resident) - found for found in resident)
    others = tuple(Tensor("x", Role.ACTIVATION, found, step, step) for step, found in enumerate(filled, start=1))
    return replace(graph, tensors=(*graph.tensors, *others))


def _factors() -> Graph:
    """A parameter whose gradient, made in step 4, is the product of x and what comes back, and one of which it is not.

    Nothing else is kept of them, so that gradients alone are no less than the state.
    """
    shape, rows = (288, 320), 4
    first = Tensor("model/a", Role.PARAMETER, 90 * KIB, 0, 8, (View("model/a", "uint8", shape),))
    second = Tensor("model/b", Role.PARAMETER, 60 * KIB, 0, 8, _view("model/b", 60))
    tensors = (
        first,
        second,
        Tensor("ga", Role.GRADIENT, 90 * KIB, 4, 8, (), "model/a"),
        Tensor("gb", Role.GRADIENT, 60 * KIB, 6, 8, (), "model/b"),
        Tensor("x", Role.ACTIVATION, rows * shape[1], 1, 5),
        Tensor("came back", Role.ACTIVATION, rows * shape[0], 3, 5),
    )
    touched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
        ("op", (), (4,)), ("op", (4, 0), ()), ("op", (), (5,)), ("aten.mm.default", (5, 4), (2,)), ("op", (), ()),
        ("op", (1,), (3,)), ("op", (2,), (0,)), ("op", (3,), (1,)),
    )  # fmt: skip
    hooks = [(AnchorKind.OPTIMIZER_PRE if position == 6 else AnchorKind.FORWARD, position) for position in range(8)]
    return Graph(
        model="factors",
        arguments=(),
        device="paper",
        traced_on="cpu",
        ops=tuple(Op(name, reads, writes, 0, 0, "float32", 10 * KIB) for name, reads, writes in touched),
        tensors=tensors,
        anchors=(
            *(Anchor(kind, f"at {position}", 1, position) for kind, position in hooks),
            Anchor(AnchorKind.ITERATION_END, "", 1, 8),
        ),
    )


def _view(name: str, kib: int) -> tuple[View, ...]:
    return (View(name, "uint8", (kib * KIB,)),)


EARLY = _graph((1,), (), (0, 1), (), (0, 2), (2,))  # windows of a: -1..2, b: -3..0, c: 0..4
LATE = _graph((), (), (), (0,), (0, 1), (1, 2))  # the paper's model has no snapshot of what step 1 writes
FULL = _graph((), (), (), (), (0,), ())  # the peak, at step 3, is just before what a's deadline leaves is held


@dataclass(frozen=True)
class Setting:
    """What is compiled; `solved` leaves no plan to arithmetic, so that a solver has to find one."""

    graph: Graph
    options: Options
    solved: bool = False


def _options(bandwidth: int, interval: int, formulation: Formulation, transfers: Transfers, **more: Any) -> Options:
    return Options(bandwidth, interval, formulation=formulation, transfers=transfers, time_limit_s=30.0, **more)


_DIRECT, _PACKED = (Formulation.DIRECT, Transfers.STREAMING), (Formulation.DIRECT, Transfers.PACKED)
_COMPACT, _PAPER = (Formulation.COMPACT, Transfers.PACKED), (Formulation.PAPER, Transfers.PACKED)
SETTINGS = {
    "too slow": Setting(EARLY, _options(2_000_000_000, 2, *_DIRECT)),
    "streaming": Setting(EARLY, _options(2_600_000_000, 2, *_DIRECT)),
    "every iteration": Setting(EARLY, _options(5_100_000_000, 1, *_DIRECT)),
    "slack": Setting(EARLY, _options(3_200_000_000, 2, *_DIRECT, slack_ppm=100_000)),
    "a granule": Setting(FULL, _options(1_317_000_000, 2, *_DIRECT)),
    "limit": Setting(EARLY, _options(2_600_000_000, 2, *_DIRECT, memory_limit_bytes=900 * KIB)),
    "over the limit": Setting(EARLY, _options(2_600_000_000, 2, *_DIRECT, memory_limit_bytes=790 * KIB)),
    "packed, over the limit": Setting(
        EARLY, _options(2_600_000_000, 2, *_PACKED, chunk_bytes=2 * KIB, memory_limit_bytes=790 * KIB)
    ),
    "packed": Setting(EARLY, _options(2_600_000_000, 2, *_PACKED, chunk_bytes=2 * KIB)),
    "packed, solved": Setting(EARLY, _options(3_000_000_000, 2, *_PACKED, chunk_bytes=10 * KIB, solver="highs"), True),
    "uncut": Setting(LATE, _options(2_800_000_000, 2, *_COMPACT)),
    "coarse": Setting(LATE, _options(4 * 10**9, 2, *_COMPACT, chunk_bytes=40 * KIB, solver="highs")),
    "compact": Setting(LATE, _options(3_000_000_000, 2, *_COMPACT, chunk_bytes=2 * KIB)),
    "compact, solved": Setting(LATE, _options(4 * 10**9, 2, *_COMPACT, chunk_bytes=10 * KIB, solver="highs"), True),
    "paper": Setting(LATE, _options(4 * 10**9, 2, *_PAPER, chunk_bytes=40 * KIB, solver="highs")),
    "checkfreq": Setting(LATE, _options(2_600_000_000, 1, *_DIRECT, policy="checkfreq")),
    "checkfreq, over the limit": Setting(
        LATE, _options(2_600_000_000, 1, *_DIRECT, policy="checkfreq", memory_limit_bytes=790 * KIB)
    ),
    "checkfreq_cpu": Setting(LATE, _options(2_600_000_000, 1, *_DIRECT, policy="checkfreq_cpu")),
    "parts": Setting(_parts(), _options(3_000_000_000, 3, *_DIRECT, policy="gockpt")),
    "in place": Setting(_parts(in_place=True), _options(3_000_000_000, 3, *_DIRECT, policy="gockpt")),
    "lanes": Setting(_parts(), _options(5_000_000_000, 1, *_DIRECT, policy="rolling")),
    "three lanes": Setting(_parts(), _options(5_000_000_000, 1, *_DIRECT, policy="rolling", lanes=3)),
    "factors": Setting(_factors(), _options(1_500_000_000, 1, *_DIRECT, policy="rolling")),
    "base": Setting(_parts(), _options(5_000_000_000, 1, *_DIRECT, policy="lowdiff")),
    "replica": Setting(_parts(), _options(5_000_000_000, 1, *_DIRECT, policy="lowdiff_plus")),
    "rolling, whole": Setting(_parts(), _options(50_000_000_000, 1, *_DIRECT, policy="rolling")),
    "synchronous": Setting(LATE, _options(2_600_000_000, 1, *_DIRECT, policy="synchronous")),
}
_RULES = ("checkfreq", "checkfreq_cpu", "synchronous")


@dataclass(frozen=True)
class Mutant:
    setting: str
    make: Callable[[Function], Function]  # from the function to the wrong one
    stops: type[Exception] = VerificationError  # another error: something on the way to verify finds it first


def gives(change: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """The same function with another answer."""
    return lambda original: lambda *given, **named: change(original(*given, **named))


def takes(number: int, change: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """The same function of another argument (a method's first is its object)."""

    def make(original: Function) -> Function:
        def wrong(*given: Any, **named: Any) -> Any:
            return original(*(change(one) if place == number else one for place, one in enumerate(given)), **named)

        return wrong

    return make


def answers(value: Any) -> Callable[[Function], Function]:
    """Whatever it is asked."""
    return lambda _: lambda *_given, **_named: value


def by(number: float) -> Callable[[Any], Any]:
    return lambda value: value + number


def times(number: int) -> Callable[[Any], Any]:
    return lambda value: value * number


def half(value: Any) -> Any:
    return value // 2


def all_but_last(rows: Any) -> Any:
    return rows[:-1]


def each(**fields: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Fields of each row changed."""
    return lambda rows: type(rows)(
        replace(row, **{name: change(getattr(row, name)) for name, change in fields.items()}) for row in rows
    )


def first(**fields: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Fields of the first row changed."""
    return lambda rows: type(rows)((*each(**fields)(rows[:1]), *rows[1:]))


def field(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One field of an answer changed."""
    return lambda value: replace(value, **{name: change(getattr(value, name))})


def action(number: int, **fields: Any) -> Callable[[Any], Any]:
    """One action of a schedule changed, under a digest that is right."""

    def change(schedule: Any) -> Any:
        rows = list(schedule.actions)
        rows[number] = rows[number].model_copy(update=fields)
        return sealed(schedule.model_copy(update={"actions": tuple(rows)}))

    return change


def certified(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One claim of a schedule changed, under a digest that is right."""

    def changed(schedule: Any) -> Any:
        claims = schedule.certificate
        update = {"certificate": claims.model_copy(update={name: change(getattr(claims, name))})}
        return sealed(schedule.model_copy(update=update))

    return changed


def replaced(patch: pytest.MonkeyPatch, name: str, make: Callable[[Function], Function]) -> None:
    """Put a wrong function in the place of checkflow.NAME, wherever the package holds a reference to it."""
    module_name, _, rest = name.partition(":")
    module = importlib.import_module(f"checkflow.{module_name}")
    owner_name, _, attribute = rest.rpartition(".")
    if not owner_name:
        original = getattr(module, attribute)
        wrong = make(original)
        for held in [one for key, one in sys.modules.items() if key.split(".")[0] == "checkflow"]:
            for key, value in list(vars(held).items()):
                if value is original:
                    patch.setattr(held, key, wrong)
                elif isinstance(value, dict):  # a table of functions
                    for word in [word for word, one in value.items() if one is original]:
                        patch.setitem(value, word, wrong)
        return
    owner = getattr(module, owner_name)
    held = inspect.getattr_static(owner, attribute)
    if isinstance(held, property):
        assert held.fget is not None
        patch.setattr(owner, attribute, property(make(held.fget)))
    elif isinstance(held, cached_property):
        patch.setattr(owner, attribute, property(make(held.func)))
    elif isinstance(held, classmethod):
        patch.setattr(owner, attribute, classmethod(make(held.__func__)))
    else:
        patch.setattr(owner, attribute, make(held))


def relaxed(rows: Any) -> Any:
    """Rows of an integer program that forbid nothing."""
    return replace(rows, lower=np.full_like(rows.lower, -np.inf), upper=np.full_like(rows.upper, np.inf))


def window(release: int, deadline: int) -> Callable[[Any], Any]:
    return lambda found: (found[0] + release, found[1] + deadline)


def halves(rows: Any) -> Any:
    return type(rows)(map(half, rows))


def unslacked(original: Function) -> Function:
    return lambda *given, **named: original(*given, **(named | {"slack_ppm": 0}))


def positions(change: Callable[[int], int]) -> Callable[[Any], Any]:
    """Hooks that fire elsewhere, but for the iteration's end."""
    return lambda grid: TimeGrid(grid.problem, (*map(change, grid.positions[:-1]), grid.positions[-1]))


def read_live(part: Any) -> Any:
    """A chunk of which nobody made a copy."""
    return replace(part, created=None, released=None)


def ordinals(created: int, released: int) -> Callable[[Any], Any]:
    """A snapshot made and given back elsewhere."""
    return lambda part: (
        part
        if part.created is None
        else replace(part, created=part.created + created, released=part.released + released)
    )


def in_all(make: Callable[[Function], Function], *settings: str) -> list[Mutant]:
    return [Mutant(setting, make) for setting in settings]


_FIRST_WRITE_LATER = gives(field("state", each(first_write=by(1))))
_SHORT_OF_TRANSFERS = gives(field("transfers", all_but_last))
_PEAK_TOO_LOW = gives(field("peak_bytes", by(-KIB)))
_PEAK_TOO_HIGH = gives(field("peak_bytes", by(KIB)))
_ALL_PACKED = ("packed", "packed, solved", "compact", "compact, solved", "paper")

MUTANTS: dict[str, list[Mutant]] = {
    "plan.problem:Problem.steps": [Mutant("streaming", gives(by(-1)))],
    "plan.problem:Problem.state_bytes": [Mutant("too slow", gives(half))],
    "plan.problem:Problem.training_peak_bytes": [Mutant("streaming", gives(by(-KIB)))],
    "plan.problem:Problem.iteration_time_ns": [Mutant("streaming", gives(times(2)))],
    "plan.problem:Problem._elapsed_ns": [Mutant("streaming", gives(lambda ns: tuple(map(times(2), ns))))],
    "plan.problem:Problem.clock": [
        *in_all(gives(lambda ticks: ticks * 5 // 4), "streaming", "slack"),
        Mutant("streaming", takes(1, by(1))),
    ],
    "plan.problem:Problem.window": [
        *in_all(gives(window(0, 2)), "streaming", "slack", "packed"),
        *in_all(gives(window(-1, 0)), "streaming", "slack", "every iteration"),
        Mutant("streaming", gives(window(1, 0))),
    ],
    "plan.problem:problem_of": [
        Mutant("slack", unslacked),
        *in_all(_FIRST_WRITE_LATER, "streaming", "packed", "compact"),
        Mutant("streaming", gives(field("state", all_but_last))),
        Mutant("streaming", gives(field("resident_bytes", halves))),
        Mutant("streaming", gives(field("bandwidth_bytes_per_s", times(2)))),
        Mutant("streaming", gives(field("interval", by(1)))),
        Mutant("limit", gives(field("memory_limit_bytes", times(2)))),
        Mutant("packed", gives(field("chunk_bytes", times(2)))),
    ],
    "plan.problem:on_anchors": [
        Mutant("streaming", gives(field("anchors", lambda found: (*map(by(-1), found[:-1]), found[-1]))))
    ],
    "plan.problem:unrolled": [Mutant("paper", _FIRST_WRITE_LATER)],
    "graph:Role.is_state": [Mutant("streaming", lambda original: lambda role: original(role) and role != "buffer")],
    "graph:Graph.steps": [Mutant("streaming", gives(by(1)))],
    "graph:Graph.iteration_time_ns": [Mutant("streaming", gives(by(1)))],
    "graph:Graph.resident_bytes": [Mutant("streaming", gives(halves))],
    "graph:Graph.writes": [
        Mutant("streaming", gives(lambda found: {index: steps[:1] for index, steps in found.items()})),
        Mutant("streaming", gives(lambda found: {index: steps[-1:] for index, steps in found.items()})),
    ],
    "graph:Graph.written_state": [Mutant("streaming", gives(all_but_last))],
    "graph:_occupancy": [Mutant("streaming", gives(halves))],
    "lower:lower": [
        Mutant("streaming", gives(action(-1, offload=(2, 4), release=(3, 4)))),
        Mutant("streaming", gives(action(0, offload=(0, 1)))),
        Mutant("streaming", gives(certified("peak_bytes", by(-KIB)))),
        Mutant("streaming", gives(certified("lower_bound_bytes", by(-KIB)))),
        Mutant("streaming", gives(certified("ideal_peak_bytes", by(-KIB)))),
        Mutant("streaming", gives(certified("snapshot_bytes", by(-KIB)))),
        Mutant("streaming", gives(certified("gap", by(0.5)))),
    ],
    "lower:anchor_grid": [*in_all(gives(positions(by(1))), "streaming"), Mutant("streaming", gives(positions(by(-1))))],
    "lower:_bound_bytes": [Mutant("streaming", gives(by(-KIB))), Mutant("streaming", gives(by(KIB)))],
    "lower:executed_peak_bytes": [Mutant("packed, over the limit", answers(0))],
    "lower:_executed": [Mutant("streaming", gives(all_but_last))],
    "lower:_streamed": [
        Mutant("streaming", gives(all_but_last)),
        Mutant("streaming", gives(each(begin_ticks=by(-MIB_TICKS // 64)))),
    ],
    "lower:_rounded": [
        Mutant("compact", gives(first(created=by(1)))),
        Mutant("compact", gives(each(created=by(-1)))),
        Mutant("compact", gives(each(released=by(-1)))),
        Mutant("compact", gives(all_but_last)),
    ],
    "lower:schedule_of": [
        Mutant("streaming", gives(certified("peak_bytes", by(-KIB)))),
        *in_all(gives(certified("pause_ns", by(-1))), *_RULES),
        *in_all(gives(certified("lower_bound_bytes", by(KIB))), *_RULES),
    ],
    "lower:_act": [
        Mutant("streaming", gives(field("issued", by(1)))),
        Mutant("streaming", gives(field("released", lambda ordinal: ordinal and ordinal - 1))),
    ],
    "policies.rule:scheduled": in_all(gives(certified("pause_ns", by(1))), *_RULES),
    "policies.rule:whole_state": [
        *in_all(gives(all_but_last), *_RULES),
        *in_all(gives(each(issued=by(-1))), "checkfreq_cpu", "synchronous"),
        Mutant("checkfreq", gives(each(created=by(-1)))),
        Mutant("checkfreq", gives(each(released=by(-1)))),
    ],
    "policies.rule:until_arrived": [
        *in_all(gives(field("time_ns", by(-1))), *_RULES),
        *in_all(gives(field("ordinal", by(1))), *_RULES),
    ],
    "policies.rule:within_limit": [Mutant("checkfreq, over the limit", lambda _: lambda ruled, *_rest: ruled)],
    "policies.checkfreq:rule": [Mutant("checkfreq", gives(field("acts", all_but_last)))],
    "policies.checkfreq:schedule": [Mutant("checkfreq", gives(action(0, release=(0, 4))))],
    "policies.checkfreq:_ruled": [Mutant("checkfreq", gives(field("acts", each(released=by(-1)))))],
    "policies.checkfreq_cpu:rule": [Mutant("checkfreq_cpu", gives(field("acts", all_but_last)))],
    "policies.checkfreq_cpu:schedule": [Mutant("checkfreq_cpu", gives(action(0, offload=(0, 3))))],
    "policies.checkfreq_cpu:_guard": [Mutant("checkfreq_cpu", gives(by(1)))],
    "policies.synchronous:rule": [Mutant("synchronous", gives(field("acts", all_but_last)))],
    "policies.synchronous:schedule": [Mutant("synchronous", gives(action(0, offload=(0, 3))))],
    "compiler:_ruled": in_all(gives(certified("pause_ns", by(1))), *_RULES),
    "policies.gockpt:schedule": [Mutant("parts", gives(action(0, back=1)))],
    "policies.gockpt:_least": [
        Mutant("parts", gives(lambda found: (field("transfers", all_but_last)(found[0]), found[1]))),
    ],
    "policies.gockpt:_lowered": [Mutant("parts", gives(certified("peak_bytes", by(-KIB))))],
    "policies.rolling:schedule": [Mutant("lanes", gives(action(0, back=0)))],
    "policies.rolling:least_lanes": [
        Mutant("lanes", gives(lambda found: [(field("transfers", all_but_last)(p), of) for p, of in found])),
    ],
    "policies.rolling:_least_lanes": [
        Mutant("factors", gives(lambda found: [(field("transfers", all_but_last)(p), of) for p, of in found])),
    ],
    "policies.rolling:in_so_many": [
        Mutant("three lanes", gives(action(0, back=0))),
        Mutant("three lanes", takes(0, by(1))),
    ],
    "plan.rebuilt:_Reading._factors": [
        Mutant("factors", gives(lambda found: found and field("rows", by(1))(found))),
        Mutant("factors", gives(lambda found: found and field("size_bytes", by(-8))(found))),
        Mutant("factors", gives(lambda found: found and field("final", by(-1))(found))),
        Mutant("factors", gives(lambda found: found and field("final", by(1))(found))),
    ],
    "policies.rule:constructed": [
        Mutant("rolling, whole", gives(lambda found: [(field("transfers", all_but_last)(p), of) for p, of in found])),
    ],
    "policies.rolling:lowered": [Mutant("lanes", gives(certified("peak_bytes", by(-KIB))))],
    "policies.lowdiff:schedule": [Mutant("base", gives(action(0, back=0)))],
    "policies.lowdiff_plus:schedule": [Mutant("replica", gives(action(0, back=1)))],
    "plan.rebuilt:for_replica": [
        Mutant("replica", gives(field("state", all_but_last))),
        Mutant("replica", gives(field("replica", lambda _: False))),
    ],
    "plan.rebuilt:in_lanes": [
        Mutant("lanes", gives(lambda found: found and field("state", all_but_last)(found))),
    ],
    "plan.rebuilt:_gradient": [Mutant("parts", gives(field("size_bytes", by(-KIB))))],
    "plan.rebuilt:_replay_ns": [Mutant("parts", gives(by(1)))],
    "plan.rebuilt:replay_ns": [Mutant("parts", gives(by(1)))],
    "plan.rebuilt:rebuilt_in": [
        Mutant("parts", gives(each(final=by(-2)))),
        Mutant("parts", gives(each(state=all_but_last))),
    ],
    "plan.rebuilt:over_iterations": [
        Mutant("parts", gives(field("state", all_but_last))),
        Mutant("parts", gives(field("state", each(back=by(1))))),
    ],
    "plan.rebuilt:_Reading._begins": [
        Mutant("parts", gives(lambda found: found[:1])),
        Mutant("parts", gives(lambda found: tuple(map(by(-2), found)))),
    ],
    "plan.rebuilt:_Reading._of": [
        Mutant("parts", gives(lambda found: {name: indices[1:] for name, indices in found.items()}))
    ],
    "plan.rebuilt:_Reading._all_of": [
        Mutant(
            "parts", lambda original: lambda self, name, role: original(self, name, role)[: 1 + (role != "optimizer")]
        )
    ],
    "plan.rebuilt:_Reading._several": [Mutant("parts", gives(lambda _: False))],
    "plan.rebuilt:_Reading._gone": [Mutant("parts", gives(by(4))), Mutant("in place", gives(by(1)))],
    "plan.rebuilt:_Reading._writes": [Mutant("in place", gives(lambda _: []))],
    "plan.rebuilt:_Reading._consumed": [Mutant("in place", takes(2, by(-6)))],
    "plan.rebuilt:is_written_again": [Mutant("parts", answers(True))],
    "lower:_gradient_rows": [Mutant("parts", gives(all_but_last))],
    "lower:_state_rows": [Mutant("streaming", gives(all_but_last))],
    "compiler:_planned": [
        Mutant("limit", takes(0, field("memory_limit_bytes", times(2)))),
        Mutant("slack", takes(2, field("slack_ppm", half))),
        Mutant("streaming", takes(2, field("bandwidth_bytes_per_s", times(2)))),
    ],
    "compiler:_executed_bytes": [Mutant("packed, over the limit", answers(0))],
    "compiler:_problem": [
        Mutant("slack", gives(field("bandwidth_bytes_per_s", times(2)))),
        Mutant("streaming", gives(field("interval", by(1)))),
    ],
    "compiler:_another_try": [
        Mutant("too slow", lambda _: lambda problem, *_given: replace(problem, interval=problem.interval + 1))
    ],
    "plan.timeline.fluid:Piece.end_ticks": [Mutant("streaming", gives(by(-MIB_TICKS // 64)))],
    "plan.timeline.fluid:earliest_deadline_first": [Mutant("streaming", gives(all_but_last))],
    "plan.timeline.fluid:_simulate": [
        Mutant("streaming", gives(all_but_last)),
        Mutant("streaming", gives(each(begin_ticks=by(-MIB_TICKS // 64)))),
    ],
    "plan.timeline.fluid:link_carries": [Mutant("too slow", answers(True))],
    "plan.timeline.fluid:lower_bound_bytes": [
        Mutant("streaming", gives(by(-KIB))),
        Mutant("streaming", gives(by(KIB))),
    ],
    "plan.timeline.fluid:_left_ticks": [Mutant("streaming", gives(halves))],
    "plan.timeline.grid:TimeGrid.of": [Mutant("streaming", gives(positions(by(1))))],
    "plan.timeline.grid:TimeGrid.everywhere": [
        Mutant("streaming", gives(lambda grid: TimeGrid(grid.problem, grid.positions[1::2])))
    ],
    "plan.timeline.grid:TimeGrid._ticks": [
        Mutant("streaming", gives(lambda ticks: tuple(one * 5 // 4 for one in ticks)))
    ],
    "plan.timeline.grid:TimeGrid.cells_per_iteration": [Mutant("streaming", gives(by(-1)))],
    "plan.timeline.grid:TimeGrid.period_cells": [Mutant("streaming", gives(half))],
    "plan.timeline.grid:TimeGrid.period_ticks": [Mutant("too slow", gives(times(2)))],
    "plan.timeline.grid:TimeGrid.position": [Mutant("streaming", gives(by(1)))],
    "plan.timeline.grid:TimeGrid.clock": [
        Mutant("streaming", gives(lambda x: x * 9 // 10)),
        Mutant("streaming", takes(1, by(1))),
    ],
    "plan.timeline.grid:TimeGrid.at_or_before": [Mutant("streaming", gives(by(1)))],
    "plan.timeline.grid:TimeGrid.at_or_after": [Mutant("streaming", gives(by(-1))), Mutant("streaming", gives(by(1)))],
    "plan.timeline.grid:TimeGrid.by_clock": [Mutant("streaming", gives(by(1)))],
    "plan.timeline.grid:TimeGrid.from_clock": [
        Mutant("streaming", gives(by(1))),
        Mutant("streaming", gives(by(-1))),
    ],
    "plan.timeline.grid:TimeGrid.window": [
        Mutant("streaming", gives(window(0, 1))),
        Mutant("streaming", gives(window(-1, 0))),
    ],
    "plan.timeline.grid:TimeGrid.resident_bytes": [Mutant("streaming", gives(halves))],
    "plan.timeline.grid:TimeGrid.memory_bytes": [
        Mutant("streaming", gives(lambda memory: [one + KIB for one in memory])),
        Mutant("every iteration", gives(lambda memory: [one - KIB for one in memory])),
    ],
    "plan.timeline.grid:TimeGrid.step_of": [Mutant("streaming", gives(by(1)))],
    "plan.streaming.place:place": [
        Mutant("streaming", gives(field("placed", all_but_last))),
        Mutant("streaming", gives(field("placed", lambda placed: placed[::-1]))),
        Mutant("streaming", gives(field("peak_bytes", by(KIB)))),
    ],
    "plan.streaming.place:snapshots_of": in_all(gives(lambda found: list(found)[:-1]), "streaming", "checkfreq"),
    "plan.streaming.place:_requests": [
        Mutant("streaming", gives(all_but_last)),
        Mutant("streaming", gives(lambda requests: [*requests, requests[0]])),
        Mutant("every iteration", gives(each(release=by(-1)))),
    ],
    "plan.streaming.place:_cut": [
        Mutant("every iteration", gives(all_but_last)),
        Mutant("every iteration", gives(each(begin_ticks=by(MIB_TICKS // 64)))),
    ],
    "plan.streaming.place:_placed": [
        Mutant("streaming", gives(ordinals(0, 1))),
        Mutant("every iteration", gives(lambda part: replace(part, begin_ticks=part.begin_ticks - MIB_TICKS // 64))),
        Mutant("streaming", gives(read_live)),
        Mutant("streaming", gives(ordinals(1, 0))),
    ],
    "plan.streaming.place:_relieved": [Mutant("streaming", gives(lambda found: (found[0][:-1], found[1])))],
    "plan.streaming.place:_waiting": [
        Mutant("a granule", gives(lambda found: found and found[:-1])),
        Mutant("a granule", gives(lambda found: found and each(begin_ticks=by(-MIB_TICKS // 64))(found))),
    ],
    "plan.streaming.place:_down": [Mutant("streaming", gives(by(1))), Mutant("streaming", gives(by(512)))],
    "plan.streaming.place:_up": [Mutant("slack", gives(by(1))), Mutant("every iteration", gives(by(512)))],
    "plan.timeline.queue:queue": [
        Mutant("streaming", gives(all_but_last)),
        Mutant("streaming", gives(lambda passages: passages[::-1])),
    ],
    "plan.timeline.queue:in_order": [
        Mutant("streaming", gives(lambda begins: [begins[0] - MIB_TICKS // 64, *begins[1:]])),
        Mutant("a granule", gives(lambda begins: [begin - MIB_TICKS // 64 for begin in begins])),
    ],
    "plan.timeline.queue:_pass": [
        Mutant("streaming", gives(lambda passages: passages[::-1])),
        Mutant("every iteration", gives(each(begin_ticks=by(-MIB_TICKS // 64)))),
    ],
    "plan.solve:solve": [
        *in_all(_SHORT_OF_TRANSFERS, "streaming", "packed", "compact", "paper"),
        *in_all(_PEAK_TOO_HIGH, "streaming", "coarse"),
    ],
    "plan.packed.bounds:least_peak_bytes": [
        Mutant("coarse", lambda original: lambda *given: original(*given) + 20 * KIB),
    ],
    "plan.packed.bounds:_fluid_fits": [Mutant("coarse", takes(1, lambda headroom: headroom - 20 * KIB))],
    "plan.packed.constructive:construct": [
        *in_all(_SHORT_OF_TRANSFERS, "packed", "compact"),
        Mutant("coarse", _PEAK_TOO_LOW),
    ],
    "plan.packed.constructive:construct_within": [Mutant("compact", _SHORT_OF_TRANSFERS)],
    "plan.packed.constructive:_DeadlineGroup.add": in_all(takes(3, by(-1)), "packed", "compact"),
    "plan.packed.constructive:_within": [Mutant("compact", gives(all_but_last))],
    "plan.packed.constructive:_cyclic": [Mutant("packed", gives(all_but_last))],
    "plan.packed.constructive:_checked": [
        Mutant("packed", gives(field("transfers", each(start=by(1), finish=by(1))))),
        Mutant("compact", gives(field("transfers", each(start=by(12), finish=by(12))))),
        Mutant("coarse", _PEAK_TOO_LOW),
    ],
    "plan.streaming.planner:plan_streaming": [Mutant("streaming", _SHORT_OF_TRANSFERS)],
    "plan.streaming.planner:_plan": [Mutant("streaming", _SHORT_OF_TRANSFERS)],
    "plan.streaming.planner:transfers_of": [
        Mutant("streaming", gives(first(start=by(1)))),
        Mutant("streaming", gives(each(snapshot=lambda _: None))),
        Mutant("streaming", gives(lambda transfers: transfers[::-1])),
    ],
    "plan.packed.steps:period": [Mutant("packed", gives(half), stops=ValueError)],
    "plan.packed.steps:capacity_bytes": in_all(gives(times(2)), *_ALL_PACKED),
    "plan.packed.steps:resident_bytes": [
        Mutant("compact, solved", gives(lambda found: found + 100 * KIB * (np.arange(len(found)) == 3)))
    ],
    "plan.packed.steps:whole_chunks": [
        *in_all(gives(all_but_last), *_ALL_PACKED),
        Mutant("packed", gives(first(size_bytes=by(-1)))),
    ],
    "plan.packed.steps:classes_of": [
        *in_all(gives(each(first_write=by(1))), "packed", "compact"),
        Mutant("packed", gives(each(last_write=by(-1)))),
    ],
    "plan.packed.steps:allowed_steps": in_all(
        gives(lambda steps: range(steps.start - 1, steps.stop)), "packed", "packed, solved"
    ),
    "plan.packed.steps:snapshot_of": [
        Mutant("packed", answers(None)),
        Mutant("packed", gives(lambda created: created and created + 1)),
        Mutant("compact", gives(by(1))),
    ],
    "plan.packed.steps:occupied_from": [Mutant("packed", gives(by(1)))],
    "plan.packed.steps:peak_bytes": in_all(gives(by(-KIB)), "packed", "compact", "paper"),
    "plan.packed.packing:pack": [*in_all(_SHORT_OF_TRANSFERS, "packed"), Mutant("coarse", _PEAK_TOO_HIGH)],
    "plan.packed.packing:_model": [Mutant("compact, solved", takes(1, all_but_last))],
    "plan.packed.packing:plan_of": [Mutant("packed", _SHORT_OF_TRANSFERS)],
    "plan.packed.splitter:plan_packed": [Mutant("packed", _SHORT_OF_TRANSFERS)],
    "plan.packed.splitter:best_chunk_bytes": [Mutant("uncut", gives(by(1)))],
    "plan.packed.splitter:_granules": [Mutant("uncut", gives(by(1)))],
    "plan.packed.formulations.compact:build": [Mutant("compact, solved", takes(1, all_but_last))],
    "plan.packed.formulations.direct_packed:build": [Mutant("packed, solved", takes(1, all_but_last))],
    "plan.packed.formulations.counts:counts_model": [Mutant("packed, solved", takes(1, all_but_last))],
    "plan.packed.formulations.counts:_options": in_all(
        gives(lambda found: (found[0], found[1] - 1)), "packed, solved", "compact, solved"
    ),
    "plan.packed.formulations.counts:_transfers": [
        Mutant("packed, solved", gives(all_but_last)),
        Mutant("compact, solved", gives(each(snapshot=by(1)))),
    ],
    "plan.packed.formulations.paper:Literal.grid": [
        Mutant("paper", gives(lambda found: (found[0][:-1], found[1][:-1])), stops=ValueError)
    ],
    "plan.packed.formulations.paper:eq1": [
        Mutant("paper", gives(lambda found: (found[0], found[1], found[2] & False)), stops=SolverError)
    ],
    "plan.packed.formulations.paper:eq4": [Mutant("paper", gives(relaxed), stops=SolverError)],
    "plan.packed.formulations.paper:first_step": [Mutant("paper", gives(relaxed))],
    "plan.packed.formulations.paper:eq8": [Mutant("paper", gives(relaxed))],
    "plan.packed.formulations.paper:eq9": [Mutant("paper", gives(relaxed), stops=SolverError)],
    "plan.packed.formulations.paper:_decode": [
        Mutant("paper", gives(each(snapshot=by(1)))),
        Mutant("paper", gives(all_but_last)),
    ],
    "plan.packed.formulations.paper:build": [Mutant("paper", takes(1, all_but_last))],
}

_RECOUNTED = "the plan's peak is counted anew from its transfers; it may miss the optimum, and claims a lower bound"
_REPLANNED = "its plan is dropped once the steps' loads are counted, and another one is found"
VALID: dict[str, tuple[Mutant, str]] = {
    "plan.streaming.place:_relieve": (
        Mutant("slack", lambda _: lambda _grid, placed, *_: placed),
        "coarser cuts, more memory",
    ),
    "plan.packed.bounds:least_peak_bytes": (
        Mutant("coarse", gives(by(-KIB))),
        "a lower bound that is lower still holds",
    ),
    "plan.packed.constructive:_DeadlineGroup.take": (Mutant("packed", takes(1, times(2))), _REPLANNED),
    "plan.packed.splitter:halvings": (
        Mutant("uncut", gives(lambda sizes: [size // 1024 * 512 for size in sizes])),
        "finer chunks",
    ),
    "plan.packed.formulations.counts:_balance": (Mutant("compact, solved", gives(times(0))), _RECOUNTED),
    "plan.rebuilt:_parts": (Mutant("parts", gives(lambda found: [0 for _ in found])), "all is of one part"),
    "plan.rebuilt:_Reading._update": (Mutant("parts", gives(lambda _: 0)), "all is of one part"),
    "plan.rebuilt:_Reading.of": (Mutant("parts", gives(lambda _: None)), "all is of one part"),
    **{
        f"plan.packed.formulations.paper:{name}": (Mutant("paper", gives(relaxed)), _RECOUNTED)
        for name in ("_after", "eq2", "eq3", "eq5", "eq7", "eq10", "eq11")
    },
    "plan.packed.formulations.paper:eq12": (Mutant("paper", gives(times(0))), _RECOUNTED),
}

_ADVICE = "advice of an infeasible answer: no schedule comes from it"
_A_WORD = "names what is there"
UNTOUCHED: dict[str, str] = {
    "plan.problem:Problem.__post_init__": "refuses settings without sense; what it lets through is judged as a plan",
    "graph:Graph.liveness_bytes": "for a report; no plan uses it",
    "graph:Graph.training_peak_bytes": "for reports; a plan's is Problem.training_peak_bytes",
    "graph:Graph.entry_apart": "what no policy with gradients can use is refused",
    "graph:Graph.retimed": "makes another graph, whose schedules are its own",
    "graph:Graph.with_scratch": "makes another graph, whose schedules are its own",
    "compiler:compile_graph": "runs the chain, with verify at its end: every mutant goes through it",
    "plan.answer:Plan.gap": "for a report; a schedule's is counted from its own peak and bound",
    "plan.answer:Plan.snapshot_bytes": "for reports; a schedule's are counted from its actions",
    "policies.checkflow:schedule": "the planner's chain without its options, which compile goes through itself",
    "plan.streaming.place:Held.chunk": _A_WORD,
    "plan.streaming.place:Held.created": _A_WORD,
    "plan.streaming.place:Held.released": _A_WORD,
    "plan.rebuilt:Rebuilt.going_along_bytes": "by it parameters are put into lanes, any of which are judged",
    "policies.rule:adds": "whether plans with factors are made, too: any of them are judged",
    "policies:longest": "bounds the intervals that a choice looks at",
    "policies:most_lanes": "bounds what may be asked for",
    "policies:sends_gradients": "whose share of what ranks have alike is kept together",
    "policies:is_of_one_process": "what ranks cannot follow is refused",
    "compiler:check_lanes": "refuses what does not go together",
    "compiler:check_interval": "bounds what may be asked for",
    "policies:names": _A_WORD,
    "policies:load": _A_WORD,
    "policies:Policy.schedule": _A_WORD,
    "policies.rule:by_first_write": "an order: what is issued in any is judged",
    "policies.checkfreq:at_best": "for reports: nothing follows it",
    "policies.checkfreq:_bandwidth_for": _ADVICE,
    "compiler:Compiled.plan": "for reports",
    "compiler:check_policy": "refuses what does not go together",
    "compiler:check_ranks": "refuses what does not go together",
    "compiler:_check_entries": "refuses what does not go together",
    "compiler:_least_paused": "chooses an interval, whose schedule is judged",
    "compiler:_as_planned": "refuses a streaming plan that is not what runs",
    "compiler:_as_asked": "checks what verify cannot know: what was asked for",
    "compiler:_without_slack": _ADVICE,
    "compiler:explain": _ADVICE,
    "compiler:_constructed": _ADVICE,
    "compiler:_unsearched": _ADVICE,
    "compiler:_least_interval": "where a search begins, or ends: whatever comes of it is judged",
    "compiler:_bandwidth": _ADVICE,
    "compiler:_interval": _ADVICE,
    "compiler:_policy": _ADVICE,
    "compiler:_memory": _ADVICE,
    "compiler:_formulation": _ADVICE,
    "plan.solve:transfers_for": "chooses the formulation's transfers; the schedule says which, and is judged by them",
    "plan.packed.bounds:link_fits": "says no early; what it lets through is packed or is not",
    "plan.packed.bounds:chunks_can_fit": "says no early; what it lets through is packed or is not",
    "plan.solve:construct": _ADVICE,
    "plan.packed.bounds:sizes_can_fit": "says no early; what it lets through is packed or is not",
    "plan.streaming.planner:construct_streaming": _ADVICE,
    "plan.streaming.planner:_possible": _ADVICE,
    "plan.streaming.planner:_too_slow": _ADVICE,
    "plan.packed.splitter:construct_packed": "advice, or the last try under a limit: constructive's transfers",
    "plan.packed.splitter:_possible": "says no early; what it lets through is packed or is not",
    "plan.packed.steps:Model.bytes_of": "a solver's bound is what verify takes on trust, and says so (proven_by)",
    "plan.packed.splitter:smallest_chunk_bytes": "where splitting ends: chunks of any size are judged",
    "plan.packed.formulations.counts:_families": _A_WORD,
    "plan.packed.formulations.paper:Literal.chunks": _A_WORD,
    "plan.packed.formulations.paper:Literal.pairs": _A_WORD,
    "plan.packed.formulations.paper:Literal.columns": _A_WORD,
    "plan.packed.formulations.paper:Literal.block": _A_WORD,
    "plan.packed.formulations.paper:Literal.rows": "makes the rows of eq2 to eq8, each mutated by itself",
    "plan.packed.formulations.paper:eq6": "always holds: state is resident at each step",
    "plan.packed.formulations.paper:_encode": "a warm start: the solver checks it, and the literal model is given none",
}

ELSEWHERE: dict[str, str] = {  # modules whose functions have no mutants
    "plan.infeasible": _ADVICE,
    "plan.packed.program": "hands a program to a solver; its answer is decoded and judged as a plan",
    "plan.packed.backends": "the same",
}
