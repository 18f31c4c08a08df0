"""compile_graph beyond what the command line's tests see."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from mutants import SETTINGS

from checkflow.compiler import Compiled, Options, Refused, _as_planned, compile_graph, explain
from checkflow.errors import VerificationError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.plan import ProvenBy, Reason, Transfers
from checkflow.report.terminal import rows_of


def test_a_longer_interval_is_not_tried_for_ever() -> None:
    """One chunk fits only the step that overwrites it: whatever the bound says, every interval needs its snapshot."""
    graph = Graph(
        model="hopeless",
        arguments=(),
        device="paper",
        traced_on="cpu",
        ops=tuple(Op("step", (), (0,) if ns == 60 else (), 0, 0, "float32", ns) for ns in (40, 40, 60)),
        tensors=(Tensor("model/a", Role.PARAMETER, 512, 0, 3, (View("model/a", "uint8", (512,)),)),),
        anchors=(Anchor(AnchorKind.ITERATION_END, "", 1, 3),),
    )
    options = Options(bandwidth_bytes_per_s=10**10, interval=None, memory_limit_bytes=512, transfers=Transfers.PACKED)
    told: list[str] = []
    answer = compile_graph(graph, options, told.append)
    assert isinstance(answer, Refused) and answer.answer.reason is Reason.MEMORY
    assert sum(line.startswith("planning") for line in told) == 3


def test_with_an_open_interval_what_no_interval_mends_is_the_reason() -> None:
    """A limit below the training's own peak, on a link that takes several iterations: a larger batch is no way out."""
    setting = SETTINGS["too slow"]
    for interval in (None, 9):
        options = replace(setting.options, interval=interval, memory_limit_bytes=1, transfers=Transfers.STREAMING)
        answer = compile_graph(setting.graph, options)
        assert isinstance(answer, Refused) and answer.answer.reason is Reason.MEMORY
        assert "what would do: --memory-limit" in explain(answer) and "batch" not in explain(answer)


def test_an_interval_that_no_search_goes_to_is_named() -> None:
    setting = SETTINGS["too slow"]
    options = replace(setting.options, interval=None, bandwidth_bytes_per_s=1_000_000, transfers=Transfers.STREAMING)
    answer = compile_graph(setting.graph, options)
    assert isinstance(answer, Refused)
    found = re.search(r"takes (\d+) iterations, more than the 4096 that auto goes to", explain(answer))
    assert found is not None
    there = compile_graph(setting.graph, replace(options, interval=int(found[1])))
    assert isinstance(there, Compiled) and there.schedule.interval > 4096


def test_an_optimum_of_a_solver_is_called_one_for_its_chunks() -> None:
    """In chunks of 28 KiB the solver proves a peak that chunks of 10 KiB beat; the report says for which it holds."""
    setting = SETTINGS["coarse"]
    coarse = compile_graph(setting.graph, replace(setting.options, chunk_bytes=28 * 1024))
    fine = compile_graph(setting.graph, replace(setting.options, chunk_bytes=10 * 1024))
    assert isinstance(coarse, Compiled) and isinstance(fine, Compiled)
    assert (coarse.plan.gap, coarse.plan.proven_by) == (0.0, ProvenBy.MILP)
    assert fine.plan.peak_bytes < coarse.plan.peak_bytes
    assert "for these chunks: others may need less" in dict(rows_of(coarse))[f"{coarse.plan.formulation} plan"]
    assert "chunks" not in dict(rows_of(fine))["certificate"]


def test_a_streaming_plan_that_is_not_what_runs_is_refused() -> None:
    """Peak or bound of the plan, a byte off those of the schedule; a packed plan has figures of its own."""
    setting = SETTINGS["streaming"]
    made = compile_graph(setting.graph, setting.options)
    assert isinstance(made, Compiled)
    _as_planned(made.schedule, made.plan)
    for other in (
        replace(made.plan, peak_bytes=made.plan.peak_bytes + 1),
        replace(made.plan, lower_bound_bytes=made.plan.lower_bound_bytes - 1),
    ):
        with pytest.raises(VerificationError, match="certificate: peak and bound are"):
            _as_planned(made.schedule, other)
        _as_planned(made.schedule, replace(other, transfers_kind=Transfers.PACKED))
