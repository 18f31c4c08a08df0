"""Plan or rule -> Schedule: actions at anchors, where eager PyTorch runs a hook, and what they are proven to need.

A streaming plan was made on the anchors: its transfers are the actions. A packed plan of the paper's model keeps its
order and its snapshots, each created at the last anchor that is not after its step; a packed direct one is placed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checkflow.graph import Graph, Role
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.plan import (
    TICKS_PER_BYTE,
    Chunk,
    Formulation,
    Plan,
    Problem,
    SolverRun,
    Transfers,
    on_anchors,
)
from checkflow.plan.rebuilt import is_written_again, replay_ns
from checkflow.plan.streaming.place import Placed, place, snapshots_of
from checkflow.plan.timeline.fluid import earliest_deadline_first, lower_bound_bytes
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.plan.timeline.queue import LinkRequest, in_order, queue
from checkflow.schedule import (
    ActionRow,
    AnchorRow,
    Certificate,
    GradientRow,
    Schedule,
    StateRow,
    UnlistedRow,
    ViewRow,
    sealed,
)
from checkflow.schedule import Place as AnchorPlace


@dataclass(frozen=True, slots=True)
class Act:
    """What is done with a chunk, at ordinals of a grid. Without a snapshot the live tensor is read."""

    chunk: Chunk
    created: int | None
    issued: int
    released: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    """Where training stands still until a checkpoint has arrived, and for how long."""

    ordinal: int
    time_ns: int


def lower(
    plan: Plan,
    problem: Problem,
    graph: Graph,
    *,
    bandwidth_bytes_per_s: int,
    slack_ppm: int = 0,
    policy: str = "checkflow",
) -> Schedule:
    """The schedule that executes a plan.

    Args:
        plan: of `problem`; a streaming one of plan.on_anchors(problem, graph).
        problem: plan.problem_of(graph, ...), slack taken off.
        graph: the traced iteration.
        bandwidth_bytes_per_s: of the link, before slack.
        slack_ppm: what problem_of took off, in millionths.
        policy: whose plan it is.
    """
    grid = anchor_grid(problem, graph)
    return schedule_of(
        [_act(grid, part) for part in _executed(plan, grid)],
        grid,
        graph,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        slack_ppm=slack_ppm,
        formulation=plan.formulation,
        transfers=plan.transfers_kind,
        solver=plan.solver,
        policy=policy,
    )


def schedule_of(
    acts: Sequence[Act],
    grid: TimeGrid,
    graph: Graph,
    *,
    bandwidth_bytes_per_s: int,
    slack_ppm: int = 0,
    formulation: Formulation = Formulation.DIRECT,
    transfers: Transfers = Transfers.STREAMING,
    solver: SolverRun,
    policy: str = "checkflow",
    pause: Pause | None = None,
) -> Schedule:
    """The schedule of what is done on a grid of the graph's anchors, in link order.

    Standing still while all leaves directly needs no byte, so what may pause has no bound but training's own peak.
    """
    problem = grid.problem
    training_bytes = problem.training_peak_bytes
    state_bytes = sum(graph.tensors[index].size_bytes for index in graph.written_state)
    peak_bytes = max(grid.memory_bytes(snapshots_of(acts)))
    bound_bytes = training_bytes if pause else _bound_bytes(grid)

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
            formulation=formulation.value,
            transfers=transfers.value,
            interval=problem.interval // problem.lanes,
            lanes=problem.lanes,
            replica=problem.replica,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            slack_ppm=slack_ppm,
            chunk_bytes=problem.chunk_bytes,
            granule_bytes=problem.granule_bytes,
            memory_limit_bytes=problem.memory_limit_bytes,
            steps=graph.steps,
            iteration_time_ns=graph.iteration_time_ns,
            state_bytes=state_bytes,
            static_state_bytes=sum(t.size_bytes for t in graph.tensors if t.role.is_state) - state_bytes,
            certificate=Certificate(
                training_peak_bytes=training_bytes,
                peak_bytes=peak_bytes,
                lower_bound_bytes=bound_bytes,
                ideal_peak_bytes=training_bytes if pause else _bound_bytes(TimeGrid.everywhere(problem)),
                gap=(peak_bytes - bound_bytes) / bound_bytes if peak_bytes > bound_bytes else 0.0,
                snapshot_bytes=sum(size_bytes for _, _, size_bytes in snapshots_of(acts)),
                solver=solver.name,
                solver_why=solver.why,
                pause_ns=pause.time_ns if pause else 0,
                replay_ns=replay_ns(problem, graph),
            ),
            state=_state_rows(graph),
            anchors=tuple(
                AnchorRow(kind=a.kind.value, subject=a.subject, occurrence=a.occurrence, position=a.position)
                for a in graph.anchors
            ),
            unlisted=tuple(
                UnlistedRow(name=found.name, bytes=found.size_bytes, where=found.where, scaler=found.scaler)
                for found in graph.unlisted
            ),
            actions=tuple(
                ActionRow(
                    tensor=problem.state[act.chunk.state].tensor,
                    offset=act.chunk.offset_bytes,
                    bytes=act.chunk.size_bytes,
                    back=problem.state[act.chunk.state].back,
                    snapshot=None if act.created is None else anchor(act.created),
                    offload=anchor(act.issued),
                    release=None if act.released is None else anchor(act.released),
                )
                for act in acts
            ),
            policy=policy,
            pause=anchor(pause.ordinal) if pause else None,
            gradients=_gradient_rows(problem, graph, lambda position: anchor(grid.at_or_before(position))[1]),
        )
    )


def _act(grid: TimeGrid, part: Placed) -> Act:
    """Issued at the last anchor before it has the link."""
    return Act(part.chunk, part.created, grid.by_clock(part.begin_ticks), part.released)


def executed_peak_bytes(plan: Plan, problem: Problem, graph: Graph) -> int:
    """What a plan of `problem` needs once it is moved to anchors."""
    grid = anchor_grid(problem, graph)
    return max(grid.memory_bytes(snapshots_of(_executed(plan, grid))))


def _executed(plan: Plan, grid: TimeGrid) -> tuple[Placed, ...]:
    if plan.transfers_kind is Transfers.STREAMING:
        return _streamed(plan, grid)
    return place(grid).placed if plan.formulation is Formulation.DIRECT else _rounded(plan, grid)


def anchor_grid(problem: Problem, graph: Graph) -> TimeGrid:
    """The positions at which something can be done."""
    return TimeGrid.of(on_anchors(problem, graph))


def _bound_bytes(grid: TimeGrid) -> int:
    """What no plan on the grid can do with less of."""
    return max(grid.problem.training_peak_bytes, lower_bound_bytes(grid, earliest_deadline_first(grid)))


def _streamed(plan: Plan, grid: TimeGrid) -> tuple[Placed, ...]:
    """The transfers of a plan on this grid."""
    created = [None if t.snapshot is None else grid.at_or_before(t.snapshot) for t in plan.transfers]
    ready = [
        grid.window(grid.problem.state[t.chunk.state])[0] if made is None else made
        for t, made in zip(plan.transfers, created, strict=True)
    ]
    begins = in_order(grid, ready, [t.chunk.size_bytes for t in plan.transfers])
    ends = [begin + t.chunk.size_bytes * TICKS_PER_BYTE for begin, t in zip(begins, plan.transfers, strict=True)]
    return tuple(
        Placed(t.chunk, begin, end, made, None if made is None else grid.from_clock(end))
        for t, begin, end, made in zip(plan.transfers, begins, ends, created, strict=True)
    )


def _rounded(plan: Plan, grid: TimeGrid) -> tuple[Placed, ...]:
    """Snapshots of a plan of the paper's model, at anchors; the link takes them in the plan's order."""
    requests = []
    deadlines = [grid.window(tensor)[1] for tensor in grid.problem.state]
    for rank, transfer in enumerate(plan.transfers):
        assert transfer.snapshot is not None, "the paper's model snapshots every chunk"
        created = min(grid.at_or_before(transfer.snapshot), deadlines[transfer.chunk.state])
        requests.append(LinkRequest(transfer.chunk, created, (rank, 0)))
    return tuple(
        Placed(
            chunk=passage.moved.chunk,
            begin_ticks=passage.begin_ticks,
            end_ticks=passage.end_ticks,
            created=passage.moved.release,
            released=grid.from_clock(passage.end_ticks),
        )
        for passage in queue(grid, requests)
    )


def _gradient_rows(problem: Problem, graph: Graph, last_anchor: Callable[[int], int]) -> tuple[GradientRow, ...]:
    of = {view.name: view for index in graph.written_state for view in graph.tensors[index].views}
    found = {source.tensor: source for source in problem.state if source.role is Role.GRADIENT}
    views = ((index, of[graph.tensors[index].of]) for index in sorted(found))
    return tuple(
        GradientRow(
            id=index,
            bytes=found[index].size_bytes,
            factor_rows=found[index].factor_rows,
            until=last_anchor(found[index].first_write - 1) if is_written_again(index, graph) else None,
            parameter=ViewRow(name=view.name, dtype=view.dtype, shape=view.shape),
        )
        for index, view in views
    )


def _state_rows(graph: Graph) -> tuple[StateRow, ...]:
    return tuple(
        StateRow(
            id=index,
            bytes=tensor.size_bytes,
            written=index in graph.writes,
            views=tuple(ViewRow(name=view.name, dtype=view.dtype, shape=view.shape) for view in tensor.views),
        )
        for index, tensor in enumerate(graph.tensors)
        if tensor.role.is_state
    )
