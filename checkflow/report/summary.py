"""A compilation's figures as one flat object, for --json and for tables."""

from __future__ import annotations

from checkflow.compiler import Compiled, Options, Refused, explain
from checkflow.graph import Graph
from checkflow.plan import Problem, ProvenBy
from checkflow.plan.solve import transfers_for
from checkflow.policies import checkfreq
from checkflow.report.operators import critical_path
from checkflow.simulation.drift import tolerated_drift_ppm

Figures = dict[str, str | int | float | bool | None]


def of_compiled(compiled: Compiled, trace_s: float, path: str) -> Figures:
    """The figures of a plan. Bytes, bytes a second, nanoseconds and seconds, as the names say; gap is a fraction."""
    certificate, plan = compiled.schedule.certificate, compiled.planned
    return _common(compiled.graph, compiled.problem, compiled.schedule.bandwidth_bytes_per_s, feasible=True) | {
        "chunks": len(compiled.schedule.actions),
        "peak_bytes": certificate.peak_bytes,
        "lower_bound_bytes": certificate.lower_bound_bytes,
        "ideal_peak_bytes": certificate.ideal_peak_bytes,
        "snapshot_bytes": certificate.snapshot_bytes,
        "gap": certificate.gap,
        "planned_peak_bytes": plan.peak_bytes if plan else certificate.peak_bytes,
        "planned_bound_bytes": plan.lower_bound_bytes if plan else certificate.lower_bound_bytes,
        "proven_by": plan.proven_by.value if plan else ProvenBy.BOUND.value,
        "policy": compiled.schedule.policy,
        "pause_ns": certificate.pause_ns,
        "replay_ns": certificate.replay_ns,
        "memory_limit_bytes": compiled.problem.memory_limit_bytes,
        "checkfreq_peak_bytes": checkfreq.at_best(compiled.problem).peak_bytes,
        "formulation": compiled.schedule.formulation,
        "transfers": compiled.schedule.transfers,
        "solver": certificate.solver,
        "solver_why": certificate.solver_why,
        "solver_s": plan.solver.wall_s if plan else 0.0,
        "slack": compiled.schedule.slack_ppm / 1e6,
        "tolerated_drift": tolerated_drift_ppm(compiled.schedule, compiled.graph) / 1e6,
        "why_not_each": compiled.why_not_each or None,
        "trace_s": trace_s,
        "plan_s": compiled.plan_s,
        "schedule": path,
    }


def of_refused(refused: Refused, options: Options, trace_s: float) -> Figures:
    """Why there is no plan, and what would make one."""
    answer = refused.answer
    return _common(refused.graph, refused.problem, options.bandwidth_bytes_per_s, feasible=False) | {
        "reason": answer.reason.value,
        "needed_bandwidth_bytes_per_s": answer.needed_bandwidth_bytes_per_s,
        "smallest_interval": answer.smallest_interval,
        "snapshot_bytes_at_that_interval": answer.snapshot_bytes_at_that_interval,
        "message": explain(refused),
        "formulation": options.formulation.value,
        "transfers": transfers_for(options.formulation, options.transfers).value,
        "slack": options.slack_ppm / 1e6,
        "trace_s": trace_s,
        "plan_s": refused.plan_s,
        "schedule": None,
    }


def _common(graph: Graph, problem: Problem, bandwidth_bytes_per_s: int, *, feasible: bool) -> Figures:
    return {
        "feasible": feasible,
        "model": graph.model,
        "device": graph.device,
        "world_size": graph.world_size,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
        "interval": problem.interval,
        "steps": graph.steps,
        "state_tensors": len(problem.state),
        "state_bytes": problem.state_bytes,
        "iteration_time_ns": graph.iteration_time_ns,
        "critical_path_ns": critical_path(graph).time_ns,
        "training_peak_bytes": problem.training_peak_bytes,
    }
