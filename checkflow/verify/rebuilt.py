"""State that is saved as it was some iterations before its checkpoint: what may be, and the gradients that it takes.

Derived here a second time from docs/model.md, "Several iterations for one checkpoint".
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from checkflow.graph import Graph
from checkflow.schedule import Schedule
from checkflow.verify.failure import fail
from checkflow.verify.lookup import Lookup, lookup_of
from checkflow.verify.terms import Saved, is_state, last_to


class Consumed(NamedTuple):
    """A gradient as its update consumes it: complete from `final` on, and there until before step `gone` of the next
    iteration (0 or less: it goes before its own ends). `again`: for training writes the next one in its place."""

    tensor: int
    final: int
    gone: int
    size_bytes: int  # of the gradient, or of the factors that leave in its place
    again: bool = False


def with_gradients(schedule: Schedule, graph: Graph, state: Sequence[Saved]) -> tuple[Saved, ...]:
    """What the actions have to carry: the state, each tensor of the iteration that its rows say, and its gradients.

    Raises VerificationError where a row says an earlier iteration of what no gradient rebuilds, or a gradient's row in
    the schedule is not that of the graph.
    """
    state = [saved for saved in state if saved.size_bytes]  # of an empty part of a tensor there is nothing to carry
    gradients = {row.id for row in schedule.gradients}
    backs: dict[int, set[int]] = {}
    for row in schedule.actions:
        if row.tensor not in gradients:
            backs.setdefault(row.tensor, set()).add(row.back)
    if schedule.replica:
        return _for_replica(schedule, graph, state, backs)
    if schedule.lanes > 1:
        return _in_lanes(schedule, graph, state, backs)
    lookup = lookup_of(schedule, graph)
    _check_together(graph, state, backs)
    found: list[Saved] = []
    asked: dict[int, tuple[Consumed, int]] = {}  # by gradient: how many iterations of it
    for saved in state:
        back = min(backs.get(saved.tensor, {0}))
        if len(backs.get(saved.tensor, {0})) > 1 or back >= schedule.interval:
            fail(f"{saved.name}: its rows are of iterations {sorted(backs[saved.tensor])} before the checkpoint's")
        if back:
            consumed = _leaving(graph, lookup, saved.tensor)
            if consumed is None:
                fail(f"{saved.name}: is saved {back} iterations before its checkpoint, and no gradient rebuilds it")
            asked[consumed.tensor] = consumed, back
        found.append(_earlier(saved, back, len(graph.ops)))
    _check_rows(schedule, graph, lookup, asked)
    for consumed, count in asked.values():
        as_final = _as_final(graph, consumed)
        found += [_earlier(as_final, back, len(graph.ops)) for back in range(count)]
    return tuple(found)


def _in_lanes(
    schedule: Schedule, graph: Graph, state: Sequence[Saved], backs: Mapping[int, set[int]]
) -> tuple[Saved, ...]:
    """One lane has a parameter with its entries, each other one its gradient; all else each of them has."""
    lookup, steps, lanes = lookup_of(schedule, graph), len(graph.ops), range(schedule.lanes)
    _check_together(graph, state, backs)
    found: list[Saved] = []
    asked: dict[int, tuple[Consumed, int]] = {}
    for saved in state:
        its = backs.get(saved.tensor, set())
        if its == set(lanes):
            found += [_earlier(saved, back, steps) for back in lanes]
            continue
        if len(its) != 1:
            fail(f"{saved.name}: its rows are of lanes {sorted(its)}; it takes one of them, or all {len(lanes)}")
        consumed = _leaving(graph, lookup, saved.tensor)
        if consumed is None:
            fail(f"{saved.name}: is in one lane of {len(lanes)}, and no gradient rebuilds it")
        asked[consumed.tensor] = consumed, min(its)
        found.append(_earlier(saved, min(its), steps))
    _check_rows(schedule, graph, lookup, asked)
    for consumed, own in asked.values():
        as_final = _as_final(graph, consumed)
        found += [_earlier(as_final, back, steps) for back in lanes if back != own]
    return tuple(found)


def _for_replica(
    schedule: Schedule, graph: Graph, state: Sequence[Saved], backs: Mapping[int, set[int]]
) -> tuple[Saved, ...]:
    """What no row carries its gradient rebuilds, each iteration; all else leaves as it is at the iteration's end."""
    if schedule.interval > 1 or schedule.lanes > 1 or schedule.pause is not None:
        fail("replica: takes the gradients of each iteration, so an interval of 1, one lane and no pause")
    lookup = lookup_of(schedule, graph)
    _check_together(graph, state, {saved.tensor: backs.get(saved.tensor, set()) for saved in state})
    found: list[Saved] = []
    asked: dict[int, tuple[Consumed, int]] = {}
    for saved in state:
        if saved.tensor in backs:
            found.append(saved)
        elif (consumed := _leaving(graph, lookup, saved.tensor)) is None:
            fail(f"{saved.name}: no row carries it, and no gradient rebuilds it")
        else:
            asked[consumed.tensor] = consumed, 1
    _check_rows(schedule, graph, lookup, asked)
    return (*found, *(_as_final(graph, consumed) for consumed, _ in asked.values()))


def replay_ns(schedule: Schedule, graph: Graph) -> int:
    """How long a restore makes updates again: of each update's time the share of its bytes that is made again,
    as often as it is; and each product of factors. Of checkpoints in lanes, that of the one that takes longest."""
    if schedule.replica:
        return 0
    gradients = {row.id for row in schedule.gradients}
    rows = {(row.tensor, row.back) for row in schedule.actions if row.tensor not in gradients}
    times = Counter(tensor for tensor, _ in rows)
    backs = {tensor: back for tensor, back in rows if times[tensor] == 1}
    products = {row.parameter.name: graph.tensors[row.id].born for row in schedule.gradients if row.factor_rows}
    ends, times_ns = range(schedule.lanes), []
    for end in ends:
        back_of = {t: (back - end) % len(ends) if schedule.lanes > 1 else back for t, back in backs.items()}
        first_names = {graph.tensors[t].views[0].name: back for t, back in back_of.items()}
        products_ns = sum(graph.ops[born - 1].time_ns * first_names[name] for name, born in products.items())
        times_ns.append(_replay_ns(graph, back_of) + products_ns)
    return max(times_ns)


def _replay_ns(graph: Graph, backs: Mapping[int, int]) -> int:
    begins = sorted(anchor.position for anchor in graph.anchors if anchor.kind.value == "optimizer_pre")
    spent_ns, bytes_of, again_of = [0] * (len(begins) + 1), [0] * (len(begins) + 1), [0] * (len(begins) + 1)
    seen: set[int] = set()
    for step, op in enumerate(graph.ops, start=1):
        update = bisect_left(begins, step)  # so many began before it; 0: none has
        spent_ns[update] += op.time_ns
        for index in set(op.writes) - seen:
            seen.add(index)
            if graph.tensors[index].role.value in ("parameter", "optimizer"):
                bytes_of[update] += graph.tensors[index].size_bytes
                again_of[update] += graph.tensors[index].size_bytes * backs.get(index, 0)
    made = zip(spent_ns[1:], again_of[1:], bytes_of[1:], strict=True)
    return sum(time_ns * again // size for time_ns, again, size in made if again)


def _as_final(graph: Graph, consumed: Consumed) -> Saved:
    tensor = graph.tensors[consumed.tensor]
    return Saved(
        consumed.tensor, f"gradient of {tensor.of}", consumed.size_bytes, consumed.gone,
        consumed.final - len(graph.ops), consumed.gone - 1,
    )  # fmt: skip


def _check_together(graph: Graph, state: Sequence[Saved], backs: Mapping[int, set[int]]) -> None:
    """A parameter and what its optimizer keeps of it are of one iteration: an update takes both as they are."""
    first: dict[str, tuple[str, set[int]]] = {}
    for saved in state:
        tensor, its = graph.tensors[saved.tensor], backs.get(saved.tensor, {0})
        other, known = first.setdefault(tensor.of or tensor.views[0].name, (saved.name, its))
        if its != known:
            fail(f"{saved.name}: is of iterations {sorted(its)} before its checkpoint, and {other} of {sorted(known)}")


def _earlier(saved: Saved, back: int, steps: int) -> Saved:
    return saved._replace(release=saved.release - back * steps, deadline=saved.deadline - back * steps, back=back)


def _check_rows(schedule: Schedule, graph: Graph, lookup: Lookup, asked: Mapping[int, tuple[Consumed, int]]) -> None:
    if sorted(asked) != [row.id for row in schedule.gradients]:
        fail(
            f"gradients: are {[row.id for row in schedule.gradients]}, and what is saved earlier takes {sorted(asked)}"
        )
    for row in schedule.gradients:
        tensor = graph.tensors[row.id]
        ours = [(view.name, view.dtype, view.shape) for view in lookup.views.get(tensor.of, ())]
        if (
            row.bytes != asked[row.id][0].size_bytes
            or [(row.parameter.name, row.parameter.dtype, row.parameter.shape)] != ours
        ):
            fail(f"gradients: row {row.id} is not the gradient that its graph has")
        consumed, until = asked[row.id][0], None if row.until is None else schedule.position((0, row.until))
        if until != (last_to(consumed.gone - 1, lookup.places, len(graph.ops)) if consumed.again else None):
            fail(f"gradients: row {row.id} does not say until when its graph has it")


def _leaving(graph: Graph, lookup: Lookup, state: int) -> Consumed | None:
    """The gradient that rebuilds a state tensor, or its factors where its row says that they leave."""
    consumed = _consumed(graph, lookup, state)
    rows = 0 if consumed is None else lookup.factor_rows.get(consumed.tensor, 0)
    return consumed if consumed is None or not rows else _factored(graph, lookup, consumed, rows)


def _factored(graph: Graph, lookup: Lookup, consumed: Consumed, rows: int) -> Consumed:
    """What leaves is (rows, a) and (rows, b), whose product training makes and leaves as it is. Both are there when it
    has been made, and from the first anchor after that on they are held."""
    gradient = graph.tensors[consumed.tensor]
    made = graph.ops[gradient.born - 1]
    weight, sides = lookup.named[gradient.of][0], lookup.views[gradient.of][0].shape
    if made.name != "aten.mm.default" or lookup.writes[consumed.tensor] != [gradient.born] or len(sides) != 2:
        fail(f"gradients: that of {gradient.of} is not a product that is left as it is, and leaves as factors")
    factors = [graph.tensors[index] for index in made.reads]
    asked = [gradient.size_bytes // (sides[0] * sides[1]) * rows * side for side in sides]
    held_from = lookup.places[bisect_left(lookup.places, gradient.born)]
    if [factor.size_bytes for factor in factors] != asked or any(is_state(factor) for factor in factors):
        fail(f"gradients: that of {gradient.of} has no factors of {rows} rows")
    if not set(lookup.first_reads.get(weight, ())) & set(made.reads):
        fail(f"gradients: no factor of that of {gradient.of} is what its layer was given when it first ran")
    if any(max(lookup.writes.get(index, [0])) >= gradient.born for index in made.reads):
        fail(f"gradients: factors of that of {gradient.of} are written after it was made of them")
    if any(factor.freed < held_from for factor in factors):
        fail(f"gradients: factors of that of {gradient.of} are gone before they can be held, at position {held_from}")
    return Consumed(consumed.tensor, held_from, held_from + 1 - len(graph.ops), sum(asked))


def _consumed(graph: Graph, lookup: Lookup, state: int) -> Consumed | None:
    """The gradient that rebuilds a state tensor: that of its parameter, where one update writes both and nothing else.

    An update is what lies between the beginning of one and that of the next, or the iteration's end.
    """
    writes = lookup.writes
    update = [lookup.update_of(step) for step in writes[state]]
    if min(update) == 0 or min(update) != max(update):
        return None
    name = graph.tensors[state].of or graph.tensors[state].views[0].name
    parameters = lookup.named.get(name, ())
    if len(parameters) != 1 or graph.tensors[parameters[0]].role.value != "parameter" or parameters[0] not in writes:
        return None
    if graph.tensors[state].role.value not in ("parameter", "optimizer"):
        return None
    together = lookup.entries.get(name, ())
    for other in (*parameters, *together):  # are of this update alone
        if {lookup.update_of(step) for step in writes.get(other, [])} - set(update):
            return None
    of = lookup.gradients.get(name, ())
    begin, steps = lookup.begins[update[0] - 1], len(graph.ops)
    there = [i for i in of if graph.tensors[i].born <= begin < graph.tensors[i].freed and i in writes]
    made = [index for index in there if graph.tensors[index].born > 0]
    if len(made or there) != 1:
        return None
    (gradient,) = made or there
    tensor = graph.tensors[gradient]
    if tensor.size_bytes != graph.tensors[parameters[0]].size_bytes:
        return None
    if not made:
        last = max(step for index in (*parameters, *together) for step in writes.get(index, []))
        if any(begin < step <= last for step in writes[gradient]):
            return None
        gone = min([step - steps for step in writes[gradient] if step > last], default=1)
        return Consumed(gradient, begin, gone, tensor.size_bytes, again=True)
    if writes[gradient][-1] > begin:
        return None
    before = [graph.tensors[index].freed for index in of if graph.tensors[index].born == 0]
    stays = tensor.freed == steps and bool(before)
    return Consumed(gradient, begin, max(1, min(before)) if stays else tensor.freed - steps, tensor.size_bytes)
