"""State that its gradients rebuild: what may be saved as it was some iterations before its checkpoint.

An optimizer's update makes a parameter and its entries anew from what they were and the gradient. So of a checkpoint
over k iterations each parameter may leave, with its entries, in any of them; then its gradients of the later ones go
along. All else that the iteration writes (buffers, averages) is of the checkpoint's own iteration.

The gradient of a linear layer's weight is a product: of what the layer was given, and of what came back to it, each a
row for each sample. Where these *factors* are fewer bytes they may go along in its place (sufficient factors, as
Poseidon has them; Zhang et al., USENIX ATC '17).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from checkflow.graph import AnchorKind, Graph, Role
from checkflow.plan.problem import Problem, StateTensor

PRODUCT = "aten.mm.default"  # the operator that makes a linear layer's weight gradient


@dataclass(frozen=True, slots=True)
class Factors:
    """Two tensors of which a gradient is the product, the first one transposed: (rows, a) and (rows, b) of (a, b)."""

    rows: int
    size_bytes: int  # of both
    final: int  # position of the first anchor at which both and the gradient are there


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A parameter whose update is all that writes it and its entries; indices are of Graph.tensors."""

    state: tuple[int, ...]  # the parameter first
    gradient: int
    final: int  # position of the anchor at which the update begins, from which on the gradient is as it is consumed
    gone: int  # step of the next iteration by which it is freed, or written; 0 or less: before the iteration ends
    state_bytes: int
    gradient_bytes: int
    factors: Factors | None = None  # fewer bytes than the gradient

    def going_along_bytes(self, *, factors: bool) -> int:
        """Of its gradient, or of that gradient's factors where they are to go in its place."""
        return self.factors.size_bytes if factors and self.factors is not None else self.gradient_bytes


def rebuilt_in(graph: Graph) -> tuple[Rebuilt, ...]:
    """What gradients rebuild, in the order of the graph's parameters."""
    reading = _Reading(graph)
    return tuple(found for index in graph.written_state if (found := reading.of(index)) is not None)


def over_iterations(problem: Problem, graph: Graph, count: int, *, factors: bool = False) -> Problem:
    """The problem of one checkpoint each `count` iterations, of which each carries a part of the state and gradients.

    The parts are such that each iteration has as many bytes to carry: a part that leaves early has more gradients. With
    `factors` those leave in the place of gradients where they are fewer bytes.
    """
    units = rebuilt_in(graph)
    back = _parts(units, problem.state_bytes, count, factors=factors)
    of_state = {index: backs for unit, backs in zip(units, back, strict=True) for index in unit.state}
    state = [replace(tensor, back=of_state.get(tensor.tensor, 0)) for tensor in problem.state]
    gradients = [
        _gradient(unit, graph, earlier, factors=factors)
        for unit, backs in zip(units, back, strict=True)
        for earlier in range(backs)
    ]
    return replace(problem, state=(*state, *gradients), interval=count)


def in_lanes(
    problem: Problem, graph: Graph, count: int, *, base: bool = False, factors: bool = False
) -> Problem | None:
    """The problem of a checkpoint each iteration, of which each of `count` iterations carries a part in turn.

    In each of them a part of what gradients rebuild leaves, the gradients of the other parts, and all that none
    rebuilds. The parts are such that each iteration has as many bytes to carry; or, with `base`, the first one is all,
    and in the others gradients leave alone. With `factors` those leave in the place of gradients where they are fewer
    bytes. None where no gradient rebuilds any.
    """
    units = rebuilt_in(graph)
    if not units or count < 2:
        return None
    part_of: dict[int, int] = {}  # by unit
    load = [0] * count
    saved = [  # by a part that has no gradient of its own
        unit.state_bytes - unit.going_along_bytes(factors=factors) for unit in units
    ]
    for index in sorted(range(len(units)), key=lambda index: (-saved[index], index)):
        part_of[index] = 0 if base else min(range(count), key=lambda part: (load[part], part))
        load[part_of[index]] += saved[index]
    of_state = {tensor: part_of[index] for index, unit in enumerate(units) for tensor in unit.state}
    state = [
        replace(tensor, back=back)
        for tensor in problem.state
        for back in ([of_state[tensor.tensor]] if tensor.tensor in of_state else range(count))
    ]
    gradients = [
        _gradient(unit, graph, back, factors=factors)
        for index, unit in enumerate(units)
        for back in range(count)
        if back != part_of[index]
    ]
    return replace(problem, state=(*state, *gradients), interval=count, lanes=count)


def for_replica(problem: Problem, graph: Graph, *, factors: bool = False) -> Problem | None:
    """The problem of a checkpoint each iteration for which the host makes the updates, too.

    What gradients rebuild does not leave; their gradients do, and all that none rebuilds. With `factors` those leave in
    the place of gradients where they are fewer bytes. None where no gradient rebuilds any.
    """
    units = rebuilt_in(graph)
    there = {index for unit in units for index in unit.state}
    rest = tuple(tensor for tensor in problem.state if tensor.tensor not in there)
    gradients = (_gradient(unit, graph, 0, factors=factors) for unit in units)
    return replace(problem, state=(*rest, *gradients), replica=True) if units else None


def is_written_again(gradient: int, graph: Graph) -> bool:
    """Whether training writes the next gradient where this one is: it was there when the iteration began."""
    return not graph.tensors[gradient].born


def replay_ns(problem: Problem, graph: Graph) -> int:
    """What a restore takes to make updates again, at the graph's times (docs/model.md).

    Where checkpoints have lanes, of the one that takes longest.
    """
    backs: dict[int, list[int]] = {}
    multiplied: dict[str, int] = {}  # by parameter: the operator that makes its gradient of factors
    for found in problem.state:
        if found.role is not Role.GRADIENT:
            backs.setdefault(found.tensor, []).append(found.back)
        elif found.factor_rows:
            gradient = graph.tensors[found.tensor]
            multiplied[gradient.of] = graph.ops[gradient.born - 1].time_ns
    rebuilt = {tensor: its[0] for tensor, its in backs.items() if len(its) == 1}
    turned = ({t: (b + turn) % problem.lanes for t, b in rebuilt.items()} for turn in range(problem.lanes))
    return max(_replay_ns(graph, back_of if problem.lanes > 1 else rebuilt, multiplied) for back_of in turned)


def _replay_ns(graph: Graph, back_of: Mapping[int, int], multiplied: Mapping[str, int]) -> int:
    begins = [a.position for a in graph.anchors if a.kind is AnchorKind.OPTIMIZER_PRE]
    total_ns = sum(
        back * multiplied.get(graph.tensors[index].views[0].name, 0)
        for index, back in back_of.items()
        if graph.tensors[index].role is Role.PARAMETER
    )
    for begin, end in pairwise((*begins, graph.steps)):
        written = [
            index
            for index in graph.written_state
            if begin < graph.writes[index][0] <= end and graph.tensors[index].role in (Role.PARAMETER, Role.OPTIMIZER)
        ]
        size_bytes = sum(graph.tensors[index].size_bytes for index in written)
        again_bytes = sum(graph.tensors[index].size_bytes * back_of.get(index, 0) for index in written)
        if again_bytes:
            total_ns += sum(op.time_ns for op in graph.ops[begin:end]) * again_bytes // size_bytes
    return total_ns


def _gradient(unit: Rebuilt, graph: Graph, back: int, *, factors: bool = False) -> StateTensor:
    name = f"gradient of {graph.tensors[unit.state[0]].name}"
    if factors and (found := unit.factors) is not None:  # training lets go of them after that anchor
        gone = found.final + 1 - graph.steps
        return StateTensor(
            unit.gradient, name, found.size_bytes, gone, found.final, Role.GRADIENT, back, factor_rows=found.rows
        )
    return StateTensor(unit.gradient, name, unit.gradient_bytes, unit.gone, unit.final, Role.GRADIENT, back)


def _parts(units: Sequence[Rebuilt], state_bytes: int, count: int, *, factors: bool) -> list[int]:
    """For each unit, how many iterations before the checkpoint's it leaves.

    With r the share of what goes along in what it rebuilds, iteration i of k carries (1 - r)^(i-1) of what the first
    one does.
    """
    whole_bytes = sum(unit.state_bytes for unit in units)
    along_bytes = sum(unit.going_along_bytes(factors=factors) for unit in units)
    share = along_bytes / whole_bytes if whole_bytes else 0.0
    first = 1 / sum((1 - share) ** number for number in range(count)) if share < 1 else 1.0
    room = {count - 1 - number: first * (1 - share) ** number * state_bytes for number in range(count)}
    room[0] -= state_bytes - whole_bytes  # what no gradient rebuilds
    found = [0] * len(units)
    for index in sorted(range(len(units)), key=lambda index: (-units[index].state_bytes, index)):
        found[index] = max(room, key=lambda back: (room[back], -back))
        room[found[index]] -= units[index].state_bytes
    return found


@dataclass(frozen=True)
class _Reading:
    """A graph, asked which of its parameters gradients rebuild."""

    graph: Graph

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """Positions at which an update begins."""
        return tuple(a.position for a in self.graph.anchors if a.kind is AnchorKind.OPTIMIZER_PRE)

    @cached_property
    def _of(self) -> dict[str, list[int]]:
        """Gradients, and what optimizers keep, by the name of their parameter."""
        found: dict[str, list[int]] = {}
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.of:
                found.setdefault(tensor.of, []).append(index)
        return found

    def _all_of(self, name: str, role: Role) -> list[int]:
        return [index for index in self._of.get(name, ()) if self.graph.tensors[index].role is role]

    def _update(self, index: int) -> int:
        """Which update writes it first, from 1; 0: it is written before any."""
        return bisect_left(self._begins, self.graph.writes[index][0])

    def of(self, index: int) -> Rebuilt | None:
        """A tensor as a parameter that its gradient rebuilds, if it is one."""
        tensor, update = self.graph.tensors[index], self._update(index)
        if tensor.role is not Role.PARAMETER or not update or self._several(index):
            return None
        name = tensor.views[0].name
        begins = self._begins[update - 1]
        gradient = self._consumed(name, begins)
        if gradient is None or self.graph.tensors[gradient].size_bytes != tensor.size_bytes:
            return None
        entries = [found for found in self._all_of(name, Role.OPTIMIZER) if found in self.graph.writes]
        if any(self._update(entry) != update or self._several(entry) for entry in entries):
            return None
        state = (index, *entries)
        over = self.graph.steps
        if is_written_again(gradient, self.graph):  # from then on what writes it is no part of the update
            over = max(self.graph.writes[each][-1] for each in state)
        if self._writes(gradient, begins, over):
            return None
        return Rebuilt(
            state,
            gradient,
            begins,
            self._gone(name, gradient, over),
            sum(self.graph.tensors[each].size_bytes for each in state),
            self.graph.tensors[gradient].size_bytes,
            self._factors(index, gradient),
        )

    def _factors(self, parameter: int, gradient: int) -> Factors | None:
        """Those of a parameter's gradient, if it is the product of two tensors, is left as it is, and they are less."""
        graph, tensors, shape = self.graph, self.graph.tensors, self.graph.tensors[parameter].views[0].shape
        made, (first, *others) = tensors[gradient], graph.writes[gradient]
        if graph.world_size > 1 or not made.born:  # a sum over ranks, or a part of one; or added to what was there
            return None
        op = graph.ops[made.born - 1]
        if op.name != PRODUCT or len(op.reads) != 2 or others or len(shape) != 2:
            return None
        left, right = (tensors[index] for index in op.reads)
        rows = left.size_bytes * shape[1] // made.size_bytes  # made.size_bytes: of shape[0] · shape[1] elements
        if (left.size_bytes * shape[1], right.size_bytes * shape[0]) != (rows * made.size_bytes,) * 2:
            return None
        final = next(anchor.position for anchor in graph.anchors if anchor.position >= first)
        given = next(other for other in graph.ops if parameter in other.reads)  # which is held from then on
        stay = all(
            tensors[index].freed >= final
            and not tensors[index].role.is_state
            and graph.writes.get(index, (0,))[-1] < first
            for index in op.reads
        )
        if not stay or not set(op.reads) & set(given.reads):
            return None
        size_bytes = left.size_bytes + right.size_bytes
        return Factors(rows, size_bytes, final) if size_bytes < made.size_bytes else None

    def _several(self, index: int) -> bool:
        """Whether several updates write it."""
        return any(self.graph.writes[index][0] <= begins < self.graph.writes[index][-1] for begins in self._begins)

    def _consumed(self, name: str, begins: int) -> int | None:
        """A parameter's gradient when an update begins: one that the iteration made, or else one that it wrote."""
        tensors = self.graph.tensors
        there = [
            each for each in self._all_of(name, Role.GRADIENT) if tensors[each].born <= begins < tensors[each].freed
        ]
        found = [each for each in there if tensors[each].born] or [each for each in there if each in self.graph.writes]
        return found[0] if len(found) == 1 else None

    def _writes(self, index: int, after: int, until: int) -> list[int]:
        """The steps that write a tensor after one position and until another."""
        return [step for step in self.graph.writes[index] if after < step <= until]

    def _gone(self, name: str, gradient: int, over: int) -> int:
        """One that is there when the iteration begins is the last one's: it goes when that goes. Where training writes
        the next one in its place, when it first does so after the update is `over`, or when the next iteration begins,
        which may be of another kind."""
        if is_written_again(gradient, self.graph):
            later = self._writes(gradient, over, self.graph.steps)
            return later[0] - self.graph.steps if later else 1
        left = [found for found in self._all_of(name, Role.GRADIENT) if not self.graph.tensors[found].born]
        if self.graph.tensors[gradient].freed == self.graph.steps and left:
            return max(1, min(self.graph.tensors[each].freed for each in left))
        return self.graph.tensors[gradient].freed - self.graph.steps
