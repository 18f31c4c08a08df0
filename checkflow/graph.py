"""One training iteration as data: operators in execution order, the storages they touch, and where hooks can run.

A tensor here is a *storage*: tied weights and views of one storage are one Tensor with several names. Steps count
from 1 to T inclusive. A position p in 0..T is the instant after step p and before step p + 1; position 0 and
position T are the same place seen from two iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

from checkflow.unlisted import Unlisted


class Role(StrEnum):
    """What a storage is for. The first three are state: a resume needs them."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    GRADIENT = "gradient"
    INPUT = "input"
    ACTIVATION = "activation"

    @property
    def is_state(self) -> bool:
        return self in (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER)


class AnchorKind(StrEnum):
    """A place in eager PyTorch where our code runs."""

    FORWARD_PRE = "forward_pre"
    FORWARD = "forward"
    GRADIENT = "gradient"
    OPTIMIZER_PRE = "optimizer_pre"
    UPDATE = "update"  # before a foreach function that the optimizer's update calls
    OPTIMIZER = "optimizer"
    ITERATION_END = "iteration_end"


@dataclass(frozen=True, slots=True)
class View:
    """One name under which user code knows (part of) a state storage."""

    name: str  # "model/features.0.weight", "optimizer/features.0.weight.exp_avg"
    dtype: str  # "float32"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One storage. Resident from step max(born, 1) to step freed inclusive, as eager PyTorch really frees it."""

    name: str
    role: Role
    size_bytes: int
    born: int  # step that allocates it; 0: resident before the iteration
    freed: int  # last step during which it is resident; T: alive when the iteration ends
    views: tuple[View, ...] = ()  # state only; the first one names it
    of: str = ""  # of a gradient or an optimizer's entry: the name of its parameter, where all of the storage is of one


class CollectiveKind(StrEnum):
    """What ranks do together; of what size, `Collective` says."""

    ALL_GATHER = "all_gather"  # each has a part, then all have all
    REDUCE_SCATTER = "reduce_scatter"  # each has all, then a part of the sum
    ALL_REDUCE = "all_reduce"  # each has all, then the sum of all
    ALL_TO_ALL = "all_to_all"  # each has a part for each
    ROOTED = "rooted"  # one has all; each gets it, or a part of it, or the one gets theirs
    BETWEEN_TWO = "between_two"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True)
class Collective:
    """What an operator moves between ranks. Groups that differ only in where they begin look the same."""

    kind: CollectiveKind
    size_bytes: int  # of what all of the group have together in the end, or in the beginning
    ranks: int  # in the group
    stride: int  # from one of them to the next; the least, where that differs


@dataclass(frozen=True, slots=True)
class Op:
    """One operator. Its step is its place in Graph.ops, counted from 1; tensors are indices into Graph.tensors."""

    name: str  # "aten.addmm.default"
    reads: tuple[int, ...]
    writes: tuple[int, ...]  # storages it changes or fills, new ones included
    flops: int
    traffic_bytes: int  # bytes it reads plus bytes it writes
    dtype: str  # of its arithmetic, "float32"
    time_ns: int  # modelled by hardware.retime, or measured; 0 until then
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The occurrence-th firing (from 1) of one hook in an iteration, at a position. At most one for each position."""

    kind: AnchorKind
    subject: str  # "model/features.0", "optimizer", "optimizer/_foreach_mul_"; "" for the iteration's end
    occurrence: int
    position: int


@dataclass(frozen=True)
class Graph:
    """The traced iteration. `anchors` are in order of position, and the last is the iteration's end, at position T."""

    model: str
    arguments: tuple[tuple[str, str], ...]  # factory arguments, as given
    device: str  # profile whose times the operators carry, "measured" or "" before retime
    traced_on: str  # "cpu", "cuda"
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    anchors: tuple[Anchor, ...]
    host_state_bytes: int = 0  # state that already lives on the host and never crosses the link
    unlisted: tuple[Unlisted, ...] = ()
    world_size: int = 1  # ranks, of one of which this is
    divided: bool = False  # of what ranks have alike the state is this one's share

    @property
    def steps(self) -> int:
        """T, the number of operators."""
        return len(self.ops)

    @cached_property
    def iteration_time_ns(self) -> int:
        return sum(op.time_ns for op in self.ops)

    @cached_property
    def resident_bytes(self) -> tuple[int, ...]:
        """Σ l_{e,t}·η(e) for t = 1..T (index t - 1), by eager's true lifetimes."""
        return _occupancy([(t.born, t.freed, t.size_bytes) for t in self.tensors], self.steps)

    @cached_property
    def liveness_bytes(self) -> tuple[int, ...]:
        """The same when each tensor is freed after its last use in the graph. State stays resident throughout."""
        last_use = dict.fromkeys(range(len(self.tensors)), 0)
        for step, op in enumerate(self.ops, start=1):
            last_use.update(dict.fromkeys((*op.reads, *op.writes), step))
        return _occupancy(
            [
                (t.born, self.steps if t.role.is_state else last_use[i], t.size_bytes)
                for i, t in enumerate(self.tensors)
            ],
            self.steps,
        )

    @cached_property
    def training_peak_bytes(self) -> int:
        return max(self.resident_bytes, default=0)

    @cached_property
    def writes(self) -> dict[int, tuple[int, ...]]:
        """Steps that write each tensor (by index), ascending; tensors that nothing writes are absent."""
        steps: dict[int, list[int]] = {}
        for step, op in enumerate(self.ops, start=1):
            for index in op.writes:
                steps.setdefault(index, []).append(step)
        return {index: tuple(found) for index, found in steps.items()}

    @cached_property
    def written_state(self) -> tuple[int, ...]:
        """Indices of the state tensors (Ê) that the iteration writes: what each checkpoint has to carry anew.

        A rank's part of a tensor that has no element is none of them.
        """
        return tuple(i for i, t in enumerate(self.tensors) if t.role.is_state and t.size_bytes and i in self.writes)

    @cached_property
    def entry_apart(self) -> Tensor | None:
        """The first thing that an optimizer keeps of a parameter which another rank saves; None where there is none."""
        here = {view.name for tensor in self.tensors if tensor.role is Role.PARAMETER for view in tensor.views}
        entries = (each for each in self.tensors if each.role is Role.OPTIMIZER and each.of)
        return next((each for each in entries if self.divided and each.of not in here), None)

    def retimed(self, device: str, times_ns: list[int]) -> Graph:
        """The same graph with other operator times."""
        ops = tuple(replace(op, time_ns=time) for op, time in zip(self.ops, times_ns, strict=True))
        return replace(self, device=device, ops=ops)

    def with_scratch(self, sizes_bytes: list[int]) -> Graph:
        """The same graph with a tensor for what each operator allocates for itself, there during its step alone."""
        tensors, ops = list(self.tensors), list(self.ops)
        for step, size_bytes in enumerate(sizes_bytes, start=1):
            if size_bytes:
                ops[step - 1] = replace(ops[step - 1], writes=(*ops[step - 1].writes, len(tensors)))
                tensors.append(Tensor(f"%scratch_{step}", Role.ACTIVATION, size_bytes, step, step))
        return replace(self, ops=tuple(ops), tensors=tuple(tensors))


def _occupancy(intervals: list[tuple[int, int, int]], steps: int) -> tuple[int, ...]:
    """Bytes resident at each step 1..steps, from (born, freed, bytes)."""
    delta = [0] * (steps + 2)
    for born, freed, size_bytes in intervals:
        if freed >= max(born, 1):
            delta[max(born, 1)] += size_bytes
            delta[freed + 1] -= size_bytes
    return tuple(accumulate(delta[1 : steps + 1]))
