"""Looks for plans: solve() is the one way in."""

from __future__ import annotations

from collections.abc import Callable

from checkflow.errors import InputError
from checkflow.plan import Formulation, Infeasible, Plan, Problem, Transfers
from checkflow.plan.infeasible import Needs, as_planned
from checkflow.plan.streaming.planner import construct_streaming, plan_streaming
from checkflow.spelling import option


def transfers_for(formulation: Formulation, asked: Transfers | None) -> Transfers:
    """The transfers a formulation works with. Raises InputError for the paper's model with streaming."""
    if formulation is Formulation.DIRECT:
        return asked or Transfers.STREAMING
    if asked is Transfers.STREAMING:
        raise InputError(
            f"{option('transfers', 'streaming')}: the {formulation} formulation is packed (Eq 9); leave it out, or use "
            f"{option('formulation', 'direct')}"
        )
    return Transfers.PACKED


def solve(
    problem: Problem,
    formulation: Formulation = Formulation.DIRECT,
    transfers: Transfers | None = None,
    *,
    needs: Needs = as_planned,
    solver: str = "auto",
    time_limit_s: float = 300.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan | Infeasible:
    """The plan of least peak memory, or why there is none.

    Args:
        problem: what to place, see docs/model.md.
        formulation, transfers: the model; transfers_for says which go together, and what None is.
        needs: bytes that a packed plan needs once it is moved to anchors; the memory limit holds for them, too. A
            streaming plan is made on the problem's anchors, so that its peak is what it needs.
        solver: "auto", "gurobi", "highs" or "cbc"; used only where arithmetic does not prove the optimum.
        time_limit_s: for the solver in seconds; when it runs out the best plan is returned with its gap.
        progress: told what goes on, in a few words.

    Raises:
        InputError: transfers that the formulation does not have.
        SolverError: the solver that was asked for cannot run.
    """
    if transfers_for(formulation, transfers) is Transfers.STREAMING:
        return plan_streaming(problem)
    from checkflow.plan.packed.splitter import plan_packed  # scipy takes half a second, which nothing else needs

    return plan_packed(problem, formulation, needs=needs, solver=solver, time_limit_s=time_limit_s, progress=progress)


def construct(
    problem: Problem,
    formulation: Formulation = Formulation.DIRECT,
    transfers: Transfers | None = None,
    *,
    needs: Needs = as_planned,
) -> Plan | None:
    """A plan found without a solver, or None; where there is one, solve finds one that needs no more."""
    if transfers_for(formulation, transfers) is Transfers.STREAMING:
        return construct_streaming(problem)
    from checkflow.plan.packed.splitter import construct_packed

    return construct_packed(problem, formulation, needs)
