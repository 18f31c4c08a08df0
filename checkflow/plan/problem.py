"""What is planned. The model is docs/model.md.

Steps and positions of a checkpoint are *unrolled*: the checkpoint saves the state as it is at position 0, the end of
iteration 0; step t of iteration i is step t + (i - 1)·T. So steps 1..T belong to the next iteration, and the last
steps of iteration 0 are ..., -1, 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from checkflow.errors import InputError
from checkflow.graph import Graph, Role

PPM = 1_000_000
TICKS_PER_BYTE = 1_000_000_000  # of the link's clock


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state tensor that the iteration writes, or a gradient that rebuilds some (plan/rebuilt.py).

    At `first_write` the live one is lost: of state while the next iteration runs; 0 or less is before that begins.
    """

    tensor: int  # index into Graph.tensors
    name: str
    size_bytes: int
    first_write: int  # u(e), 1..T for state
    last_write: int  # 1..T, at or after u(e)
    role: Role = Role.PARAMETER  # a buffer may be written before the update
    back: int = 0  # iterations before the checkpoint's whose value it is; of a gradient, whose update consumes it
    factor_rows: int = 0  # of a gradient that leaves as its factors: of each; else 0


@dataclass(frozen=True)
class Problem:
    """Where can the checkpoint's bytes go? All integers; slack is already taken off times and bandwidth."""

    time_ns: tuple[int, ...]  # of steps 1..T
    resident_bytes: tuple[int, ...]  # of training alone, at steps 1..T
    state: tuple[StateTensor, ...]
    bandwidth_bytes_per_s: int
    interval: int = 1  # iterations after which the plan begins anew, k: from one checkpoint to the next
    lanes: int = 1  # k too, where each of them ends with a checkpoint that has a part of the others; else 1
    replica: bool = False  # what gradients rebuild does not leave: the host makes its updates, too
    chunk_bytes: int | None = None  # largest chunk; None: as large as the formulation likes
    granule_bytes: int = 512  # splits fall on multiples of this (CUDA's allocator rounds to it)
    memory_limit_bytes: int | None = None  # M
    anchors: tuple[int, ...] | None = None  # positions in 1..T at which something may be done, ascending; None: at all

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "interval", "granule_bytes", "chunk_bytes", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} is not positive; give a whole number of at least 1")
        if self.chunk_bytes is not None and self.chunk_bytes < self.granule_bytes:
            raise InputError(f"chunk: {self.chunk_bytes} bytes is too small; the smallest is {self.granule_bytes}")

    @property
    def steps(self) -> int:
        return len(self.time_ns)

    @cached_property
    def state_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.state)

    @cached_property
    def training_peak_bytes(self) -> int:
        return max(self.resident_bytes, default=0)

    @cached_property
    def iteration_time_ns(self) -> int:
        return sum(self.time_ns)

    @cached_property
    def _elapsed_ns(self) -> tuple[int, ...]:
        return (0, *accumulate(self.time_ns))

    def clock(self, position: int) -> int:
        """Link clock at an unrolled position, in ticks of 1e-9 byte: B·t. A byte takes TICKS_PER_BYTE. Exact."""
        iteration, within = divmod(position, self.steps)
        return self.bandwidth_bytes_per_s * (iteration * self.iteration_time_ns + self._elapsed_ns[within])

    def window(self, tensor: StateTensor) -> tuple[int, int]:
        """(release, deadline): the unrolled positions between which the live tensor holds the checkpoint's value."""
        later = tensor.back * self.steps
        return tensor.last_write - self.steps - later, tensor.first_write - 1 - later


def problem_of(
    graph: Graph,
    *,
    bandwidth_bytes_per_s: int,
    interval: int = 1,
    chunk_bytes: int | None = None,
    granule_bytes: int = 512,
    memory_limit_bytes: int | None = None,
    slack_ppm: int = 0,
) -> Problem:
    """The planning problem of a graph. Slack σ derates both sides: floor((1 - σ)·τ) and floor((1 - σ)·B)."""
    if not 0 <= slack_ppm < PPM:
        raise InputError(f"slack: {slack_ppm / PPM} is not in [0, 1); 0.1 tolerates 10% drift")
    return Problem(
        time_ns=tuple(op.time_ns * (PPM - slack_ppm) // PPM for op in graph.ops),
        resident_bytes=graph.resident_bytes,
        state=tuple(
            StateTensor(i, tensor.name, tensor.size_bytes, graph.writes[i][0], graph.writes[i][-1], tensor.role)
            for i, tensor in ((i, graph.tensors[i]) for i in graph.written_state)
        ),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s * (PPM - slack_ppm) // PPM,
        interval=interval,
        chunk_bytes=chunk_bytes,
        granule_bytes=granule_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )


def on_anchors(problem: Problem, graph: Graph) -> Problem:
    """The problem with nothing done between anchors. One at position 0 is the iteration's end, which has its own."""
    return replace(problem, anchors=tuple(anchor.position for anchor in graph.anchors if anchor.position > 0))


def unrolled(problem: Problem) -> Problem:
    """The problem over all k iterations between two checkpoints, as one of interval 1 (for the paper's windows)."""
    k = problem.interval
    return replace(
        problem, time_ns=problem.time_ns * k, resident_bytes=problem.resident_bytes * k, interval=1, anchors=None
    )
