"""The verifier on trainings of many parameters: what it does for one more is the same however many there are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from checkflow import policies, verify
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View

VERIFY = str(Path(verify.__file__).parent)
WAYS: dict[str, dict[str, Any]] = {"gockpt": {"interval": 3}, "rolling": {"lanes": 3}, "lowdiff": {"lanes": 3}}


def many(count: int) -> Graph:
    """So many layers of a parameter, which has a moment, and an update for all of them."""
    steps = 3 * count
    parameters = [
        Tensor(f"p{i}", Role.PARAMETER, 512, 0, steps, (View(f"p{i}", "uint8", (512,)),)) for i in range(count)
    ]
    moments = [
        Tensor(f"m{i}", Role.OPTIMIZER, 1024, 0, steps, (View(f"m{i}", "uint8", (1024,)),), of=f"p{i}")
        for i in range(count)
    ]
    gradients = [Tensor(f"g{i}", Role.GRADIENT, 512, 2 * count - i, steps, of=f"p{i}") for i in range(count)]
    forward = [((i,), ()) for i in range(count)]
    backward = [((i,), (2 * count + i,)) for i in reversed(range(count))]
    update = [((2 * count + i,), (i, count + i)) for i in range(count)]
    hooks = [(AnchorKind.FORWARD, 1 + i) for i in range(count)]
    hooks += [(AnchorKind.GRADIENT, count + 1 + i) for i in range(count - 1)]
    hooks += [(AnchorKind.OPTIMIZER_PRE, 2 * count)]
    hooks += [(AnchorKind.UPDATE, 2 * count + 1 + i) for i in range(count - 1)]
    return Graph(
        model="many",
        arguments=(),
        device="paper",
        traced_on="cpu",
        ops=tuple(Op("op", reads, writes, 0, 0, "float32", 1000) for reads, writes in (*forward, *backward, *update)),
        tensors=(*parameters, *moments, *gradients),
        anchors=(
            *(Anchor(kind, f"at {position}", 1, position) for kind, position in hooks),
            Anchor(AnchorKind.ITERATION_END, "", 1, steps),
        ),
    )


def lines_run(count: int, name: str) -> int:
    """Lines of the verifier that run, those of a loop as often as it runs."""
    made = compile_graph(many(count), Options(10**9, policy=name, **WAYS.get(name, {})))
    assert isinstance(made, Compiled)
    assert bool(made.schedule.gradients) == (name in ("gockpt", "rolling", "lowdiff", "lowdiff_plus"))
    ran = 0

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal ran
        ran += event == "line"
        return note if frame.f_code.co_filename.startswith(VERIFY) else None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        verify.verify(made.schedule, made.graph)
    finally:
        sys.settrace(before)
    return ran


@pytest.mark.parametrize("name", policies.names())
def test_four_times_the_parameters_take_little_more_than_four_times_as_long(name: str) -> None:
    """Sixteen times as long, where all tensors are looked at for each of them."""
    assert 100 < lines_run(100, name) < 5.5 * lines_run(25, name)
