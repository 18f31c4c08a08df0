"""Plan -> Schedule: each action moved to an anchor, where eager PyTorch runs a hook.

A direct plan is placed anew on the grid of anchors, by the same rule and as near to its bound. A plan of the paper's
model keeps its order and its snapshots, each created at the last anchor that is not after its step.
"""

from __future__ import annotations

from checkflow.graph import Graph
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.link.grid import Grid
from checkflow.link.place import Placed, place, snapshots_of
from checkflow.link.queue import Request, queue
from checkflow.plan import Formulation, Plan, Problem
from checkflow.schedule import (
    ActionRow,
    AnchorRow,
    Certificate,
    PlanRow,
    Schedule,
    StateRow,
    UnlistedRow,
    ViewRow,
    sealed,
)
from checkflow.schedule import Place as AnchorPlace


def lower(plan: Plan, problem: Problem, graph: Graph, *, bandwidth_bytes_per_s: int, slack_ppm: int = 0) -> Schedule:
    """The schedule that executes a plan.

    Args:
        plan: of `problem`; verify_plan should have accepted it.
        problem: plan.problem_of(graph, ...), slack taken off.
        graph: the traced iteration.
        bandwidth_bytes_per_s: of the link, before slack.
        slack_ppm: what problem_of took off, in millionths.
    """
    grid = anchor_grid(problem, graph)
    placed = _executed(plan, grid)
    memory = grid.memory_bytes(snapshots_of(placed))

    def anchor(ordinal: int) -> AnchorPlace:
        iteration, within = divmod(ordinal - 1, grid.cells_per_iteration)
        return iteration + 1, within + 1 + len(graph.anchors) - grid.cells_per_iteration

    return sealed(
        Schedule(
            graph_fingerprint=graph_fingerprint(graph),
            state_fingerprint=state_fingerprint(graph),
            model=graph.model,
            arguments=graph.arguments,
            device=graph.device,
            traced_on=graph.traced_on,
            formulation=plan.formulation.value,
            transfers=plan.transfers_kind.value,
            interval=problem.interval,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            slack_ppm=slack_ppm,
            chunk_bytes=problem.chunk_bytes,
            granule_bytes=problem.granule_bytes,
            memory_limit_bytes=problem.memory_limit_bytes,
            steps=graph.steps,
            iteration_time_ns=graph.iteration_time_ns,
            state_bytes=problem.state_bytes,
            static_state_bytes=sum(t.size_bytes for t in graph.tensors if t.role.is_state) - problem.state_bytes,
            certificate=Certificate(
                training_peak_bytes=problem.training_peak_bytes,
                peak_bytes=plan.peak_bytes,
                executed_peak_bytes=max(memory),
                lower_bound_bytes=plan.lower_bound_bytes,
                gap=plan.gap,
                proven_by=plan.proven_by.value,
                solver=plan.solver.name,
                solver_why=plan.solver.why,
                snapshot_bytes=plan.snapshot_bytes,
                executed_snapshot_bytes=sum(size_bytes for _, _, size_bytes in snapshots_of(placed)),
                constructive_peak_bytes=plan.constructive_peak_bytes,
            ),
            state=_state_rows(graph),
            anchors=tuple(
                AnchorRow(kind=a.kind.value, subject=a.subject, occurrence=a.occurrence, position=a.position)
                for a in graph.anchors
            ),
            plan=tuple(
                PlanRow(
                    tensor=problem.state[t.chunk.state].tensor,
                    offset=t.chunk.offset_bytes,
                    bytes=t.chunk.size_bytes,
                    snapshot=t.snapshot,
                    start=t.start,
                    finish=t.finish,
                )
                for t in plan.transfers
            ),
            unlisted=tuple(
                UnlistedRow(name=found.name, bytes=found.size_bytes, where=found.where, scaler=found.scaler)
                for found in graph.unlisted
            ),
            actions=tuple(
                ActionRow(
                    tensor=problem.state[p.chunk.state].tensor,
                    offset=p.chunk.offset_bytes,
                    bytes=p.chunk.size_bytes,
                    snapshot=None if p.created is None else anchor(p.created),
                    offload=anchor(grid.by_clock(p.begin_ticks)),
                    release=None if p.released is None else anchor(p.released),
                )
                for p in placed
            ),
        )
    )


def executed_peak_bytes(plan: Plan, problem: Problem, graph: Graph) -> int:
    """What a plan of `problem` needs once it is moved to anchors."""
    grid = anchor_grid(problem, graph)
    return max(grid.memory_bytes(snapshots_of(_executed(plan, grid))))


def _executed(plan: Plan, grid: Grid) -> tuple[Placed, ...]:
    return place(grid).placed if plan.formulation is Formulation.DIRECT else _rounded(plan, grid)


def anchor_grid(problem: Problem, graph: Graph) -> Grid:
    """The positions that have an anchor. One at position 0 is the iteration's end before, which has its own."""
    return Grid(problem, tuple(anchor.position for anchor in graph.anchors if anchor.position > 0))


def _rounded(plan: Plan, grid: Grid) -> tuple[Placed, ...]:
    """Snapshots of a plan of the paper's model, at anchors; the link takes them in the plan's order."""
    requests = []
    deadlines = [grid.window(tensor)[1] for tensor in grid.problem.state]
    for rank, transfer in enumerate(plan.transfers):
        assert transfer.snapshot is not None, "the paper's model snapshots every chunk"
        created = min(grid.at_or_before(transfer.snapshot), deadlines[transfer.chunk.state])
        requests.append(Request(transfer.chunk, created, (rank, 0)))
    return tuple(
        Placed(
            chunk=passage.request.chunk,
            begin_ticks=passage.begin_ticks,
            end_ticks=passage.end_ticks,
            created=passage.request.release,
            released=grid.from_clock(passage.end_ticks),
        )
        for passage in queue(grid, requests)
    )


def _state_rows(graph: Graph) -> tuple[StateRow, ...]:
    written = set(graph.written_state)
    return tuple(
        StateRow(
            id=index,
            bytes=tensor.size_bytes,
            written=index in written,
            views=tuple(ViewRow(name=view.name, dtype=view.dtype, shape=view.shape) for view in tensor.views),
        )
        for index, tensor in enumerate(graph.tensors)
        if tensor.role.is_state
    )
