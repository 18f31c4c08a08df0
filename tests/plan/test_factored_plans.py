"""Gradients that leave as their factors: only where both are there, as planner and verifier each find out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from mutants import SETTINGS

from checkflow.compiler import Compiled, compile_graph
from checkflow.errors import VerificationError
from checkflow.graph import Graph, Op, Role, Tensor, View
from checkflow.graphfile import graph_fingerprint
from checkflow.plan.rebuilt import rebuilt_in
from checkflow.schedule import sealed
from checkflow.verify import verify

SETTING = SETTINGS["factors"]
GRADIENT, GIVEN, RETURNED = 2, 4, 5  # tensors of its graph
BUFFER = View("model/given", "float32", (4, 320))


def with_op(step: int, **fields: object) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        ops: list[Op] = list(graph.ops)
        ops[step - 1] = replace(ops[step - 1], **fields)  # type: ignore[arg-type]
        return replace(graph, ops=tuple(ops))

    return change


def with_tensor(index: int, **fields: object) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        tensors: list[Tensor] = list(graph.tensors)
        tensors[index] = replace(tensors[index], **fields)  # type: ignore[arg-type]
        return replace(graph, tensors=tuple(tensors))

    return change


def test_they_leave_where_gradients_are_no_less_than_the_state() -> None:
    compiled = compile_graph(SETTING.graph, SETTING.options)
    assert isinstance(compiled, Compiled)
    assert compiled.schedule.lanes == 2
    assert [(row.parameter.name, row.bytes, row.factor_rows) for row in compiled.schedule.gradients] == [
        ("model/a", 4 * (288 + 320), 4),
        ("model/b", 60 * 1024, 0),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_op(4, name="aten.add.Tensor"), "not a product"),
        (with_op(5, writes=(GRADIENT,)), "not a product that is left as it is"),
        (with_op(4, reads=(GIVEN, RETURNED)), "has no factors of 4 rows"),
        (with_op(4, reads=(RETURNED,)), "has no factors of 4 rows"),
        (with_tensor(GIVEN, size_bytes=4 * 320 + 1), "has no factors of 4 rows"),
        (with_tensor(GIVEN, role=Role.BUFFER, views=(BUFFER,)), "state"),  # its header has other state already
        (with_op(2, reads=(0,)), "what its layer was given when it first ran"),
        (with_op(5, writes=(RETURNED,)), "are written after"),
        (with_tensor(GIVEN, freed=3), "gone before they can be held"),
    ],
)
def test_where_they_are_no_factors_they_do_not_leave(change: Callable[[Graph], Graph], said: str) -> None:
    """What the planner makes no factors of, no schedule may have them of."""
    compiled = compile_graph(SETTING.graph, SETTING.options)
    assert isinstance(compiled, Compiled)
    other = change(SETTING.graph)
    assert all(unit.factors is None for unit in rebuilt_in(other))
    schedule = sealed(compiled.schedule.model_copy(update={"graph_fingerprint": graph_fingerprint(other)}))
    with pytest.raises(VerificationError, match=said):
        verify(schedule, other)


def test_they_go_along_only_where_they_are_fewer_bytes() -> None:
    """288 + 320 numbers for each row, against 288 · 320."""
    most = 288 * 320 // (288 + 320)
    for rows, pay in ((most, True), (most + 1, False)):
        graph = with_tensor(GIVEN, size_bytes=rows * 320)(with_tensor(RETURNED, size_bytes=rows * 288)(SETTING.graph))
        assert (rebuilt_in(graph)[0].factors is not None) is pay
