"""Several iterations for one checkpoint: what leaves is enough to make the state again, and is read in time.

The judge of it is an iteration played symbolically, which shares nothing with planner or verifier: each storage has a
value, the history of what made it; a restore makes updates of what was read, and has to get the values of the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from drawn import NS, updates
from hypothesis import event, given, reject
from hypothesis import strategies as st

from checkflow import policies
from checkflow.errors import VerificationError
from checkflow.graph import Graph, Role
from checkflow.lower import lower
from checkflow.plan import Infeasible, Problem, on_anchors, problem_of
from checkflow.plan.rebuilt import for_replica, in_lanes, over_iterations, rebuilt_in
from checkflow.plan.streaming.planner import construct_streaming
from checkflow.policies.rule import Asked
from checkflow.schedule import ActionRow, Schedule, sealed
from checkflow.verify import verify

Value = int  # stands for the history of what made it: equal where that is
_KNOWN: dict[tuple[object, ...], Value] = {}


def value_of(*history: object) -> Value:
    return _KNOWN.setdefault(history, len(_KNOWN))


GONE = value_of("gone")


class Played:
    """Values of each storage after each step of several iterations; `values[step]`, unrolled from 0 on."""

    def __init__(self, graph: Graph, iterations: int) -> None:
        self.graph = graph
        self.steps = len(graph.ops)
        begins = [a.position for a in graph.anchors if a.kind.value == "optimizer_pre"]
        now: dict[int, Value] = {i: value_of("first", i) for i, t in enumerate(graph.tensors) if t.role.is_state}
        self.values = [dict(now)]
        for iteration in range(iterations):
            self._hand_over(now)
            consumed: dict[int, Value] = {}
            for step, op in enumerate(graph.ops, start=1):
                updating = sum(begin < step for begin in begins)
                if step - 1 in begins:
                    consumed = dict(now)
                for index in op.writes:
                    tensor = graph.tensors[index]
                    what = value_of("op", iteration, step)
                    if updating and tensor.role in (Role.PARAMETER, Role.OPTIMIZER):
                        what = self._update(consumed, index, updating, step)
                    now[index] = value_of(now.get(index), what)
                self.values.append(dict(now))
                for index, tensor in enumerate(graph.tensors):
                    if tensor.freed == step < self.steps and not tensor.role.is_state:
                        now[index] = GONE
                self._let_go(now, step)

    def _hand_over(self, now: dict[int, Value]) -> None:
        """What the last iteration made and left is what this one finds under the same parameter's name, if any."""
        found = {t.of for t in self.graph.tensors if t.role is Role.GRADIENT and not t.born}
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.role is Role.GRADIENT and tensor.born and tensor.of not in found:
                now[index] = GONE
        self._let_go(now, 0)

    def _let_go(self, now: dict[int, Value], step: int) -> None:
        """Of what was found so."""
        gone = {t.of for t in self.graph.tensors if t.role is Role.GRADIENT and not t.born and t.freed == step}
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.role is Role.GRADIENT and tensor.born > step and tensor.of in gone:
                now[index] = GONE

    def _update(self, consumed: dict[int, Value], index: int, update: int, step: int) -> Value:
        """An update's operator works on a parameter, its entries and gradient, as they were when the update began."""
        name = self.graph.tensors[index].of or self.graph.tensors[index].views[0].name
        found = (consumed.get(i) for i, t in enumerate(self.graph.tensors) if t.of == name and t.role is Role.GRADIENT)
        gradients = tuple(value for value in found if value not in (None, GONE))
        return value_of("update", update, step, gradients, tuple(consumed[i] for i in together(self.graph, name)))


def restored(schedule: Schedule, graph: Graph, iterations: int, checkpoint: int) -> dict[int, Value] | None:
    """What a restore makes of what is read, by tensor; None where something is read too early or too late."""
    played = Played(graph, iterations)
    rows = schedule.actions
    times = [op.time_ns * (10**6 - schedule.slack_ppm) // 10**6 for op in graph.ops]
    bandwidth = schedule.bandwidth_bytes_per_s * (10**6 - schedule.slack_ppm) // 10**6

    def clock(position: int) -> int:
        whole, within = divmod(position, len(times))
        return bandwidth * (whole * sum(times) + sum(times[:within]))

    free, read = 0, dict[tuple[int, int], list[tuple[int, Value]]]()
    for number in range(schedule.period, iterations + 1, schedule.period):
        base = number * len(times)
        for row in rows:
            begin = max(free, clock(base + schedule.position(row.offload)))
            free = begin + row.bytes * NS
            age = checkpoint - (number - row.back)  # of a checkpoint in lanes, what its last iterations sent
            if not 0 <= age < schedule.lanes if schedule.lanes > 1 else number != checkpoint:
                continue
            if row.snapshot is not None and row.release is not None:
                at = base + schedule.position(row.snapshot)
                if clock(base + schedule.position(row.release)) < free:
                    return None
                span = [at]
            else:
                first, last = at_clock(clock, begin, iterations * len(times)), at_clock(clock, free, 10**6, up=True)
                span = list(range(max(first, base + schedule.position(row.offload)), last))
                span = span or [base + schedule.position(row.offload)]
            found = {played.values[p].get(row.tensor, GONE) for p in span if p < len(played.values)}
            if len(found) != 1 or GONE in found:
                return None
            back = age if schedule.lanes > 1 else row.back
            read.setdefault((row.tensor, back), []).append((row.bytes, found.pop()))
    oldest_first = sorted(read.items(), key=lambda one: -one[0][1])
    state = {tensor: parts for (tensor, _), parts in oldest_first if graph.tensors[tensor].role.is_state}
    made: dict[int, Value] = {}
    for tensor, parts in state.items():
        if (
            len({value for _, value in parts}) != 1
            or sum(size for size, _ in parts) != graph.tensors[tensor].size_bytes
        ):
            return None
        made[tensor] = parts[0][1]
    kept = set(graph.written_state) - set(made) if schedule.replica else set[int]()
    if kept:  # by the host, as it was an iteration before
        before = Played(graph, checkpoint - 1).values[-1]
        made |= {index: before[index] for index in kept}
    for index in [i for i in made if graph.tensors[i].role is Role.PARAMETER]:
        back = 1 if index in kept else min(back for tensor, back in read if tensor == index)
        again(graph, read, index, back, made)
    return made


def together(graph: Graph, name: str) -> list[int]:
    """A parameter and what its optimizer keeps of it."""
    return [i for i, t in enumerate(graph.tensors) if t.role.is_state and name in (t.of, t.views[0].name)]


def at_clock(clock: object, ticks: int, most: int, *, up: bool = False) -> int:
    """The last position whose clock is not after; with `up` the first that is not before."""
    position = 0
    while position < most and clock(position + 1) <= ticks:  # type: ignore[operator]
        position += 1
    return position + 1 if up and clock(position) < ticks else position  # type: ignore[operator]


def again(
    graph: Graph, read: dict[tuple[int, int], list[tuple[int, Value]]], index: int, back: int, made: dict[int, Value]
) -> None:
    """A parameter and its entries, brought on by the operators of `back` updates, each of the gradient read for it."""
    begins = [a.position for a in graph.anchors if a.kind.value == "optimizer_pre"]
    name = graph.tensors[index].views[0].name
    members = together(graph, name)
    named = [i for i, t in enumerate(graph.tensors) if t.of == name and t.role is Role.GRADIENT]
    for earlier in range(back - 1, -1, -1):
        gradients = tuple(read[i, earlier][0][1] for i in named if (i, earlier) in read)
        before = tuple(made.get(i, value_of("first", i)) for i in members)
        for step, op in enumerate(graph.ops, start=1):
            for member in members:
                if member in op.writes:
                    update = value_of("update", sum(begin < step for begin in begins), step, gradients, before)
                    made[member] = value_of(made[member], update)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """A schedule in up to four parts, on a link with little to spare."""
    graph = draw(updates())
    interval = draw(st.integers(2, 4))
    problem = problem_of(
        graph, bandwidth_bytes_per_s=NS, interval=interval, granule_bytes=draw(st.sampled_from((1, 3)))
    )
    bytes_ = sum(source.size_bytes for source in over_iterations(problem, graph, interval).state)
    least = -(-bytes_ * NS // (interval * graph.iteration_time_ns))
    bandwidth = least + draw(st.sampled_from((0, 1, NS // 3, NS)))
    answer = policies.load("gockpt").schedule(
        replace(problem, bandwidth_bytes_per_s=bandwidth), graph, Asked(bandwidth)
    )
    if isinstance(answer, Infeasible):
        reject()
    return graph, answer


@st.composite
def in_turn(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """A checkpoint each iteration in up to four lanes, on a link with little to spare."""
    graph, count, base = draw(updates()), draw(st.integers(2, 4)), draw(st.booleans())
    return graph, with_little_to_spare(draw, graph, lambda p: in_lanes(p, graph, count, base=base), count, "rolling")


@st.composite
def for_the_host(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """Gradients each iteration, for a replica, on a link with little to spare."""
    graph, factors = draw(updates()), draw(st.booleans())
    return graph, with_little_to_spare(draw, graph, lambda p: for_replica(p, graph, factors=factors), 1, "lowdiff_plus")


def with_little_to_spare(
    draw: st.DrawFn, graph: Graph, made: Callable[[Problem], Problem | None], iterations: int, policy: str
) -> Schedule:
    """On a link that carries what is made of a graph's problem in so many iterations, just so or with ease."""
    problem = problem_of(graph, bandwidth_bytes_per_s=NS, granule_bytes=draw(st.sampled_from((1, 3))))
    found = made(on_anchors(problem, graph))
    if found is None:
        reject()
    least = -(-found.state_bytes * NS // (iterations * graph.iteration_time_ns))
    bandwidth = least + draw(st.sampled_from((0, 1, NS // 3, NS)))
    found = replace(found, bandwidth_bytes_per_s=bandwidth)
    plan = construct_streaming(found)
    if plan is None:
        reject()
    return lower(plan, found, graph, bandwidth_bytes_per_s=bandwidth, policy=policy)


def changed(schedule: Schedule, graph: Graph, data: st.DataObject, *kinds: str) -> tuple[str, Schedule]:
    """A row is of another iteration, or all of its tensor's; at another place; of the live tensor; or left out.

    Or all state is of the checkpoint's own iteration. Gradients without rows have none in their table.
    """
    kind = data.draw(st.sampled_from(("back", "offload", "snapshot", "release", "live", "left out", *kinds)))
    rows, number = list(schedule.actions), data.draw(st.integers(0, len(schedule.actions) - 1))
    row, others = rows[number], st.integers(0, max(1, schedule.period - 1))
    if kind == "back":
        other = data.draw(others)
        rows = [each.model_copy(update={"back": other}) if each.tensor == row.tensor else each for each in rows]
    elif kind == "back alone":
        rows[number] = row.model_copy(update={"back": data.draw(others)})
    elif kind == "live":
        rows[number] = row.model_copy(update={"snapshot": None, "release": None})
    elif kind == "left out":
        rows = [each for each in rows if (each.tensor, each.back) != (row.tensor, row.back)]
    elif kind == "whole":
        rows = [each.model_copy(update={"back": 0}) for each in rows if graph.tensors[each.tensor].role.is_state]
    else:
        place = st.tuples(st.integers(1 - schedule.period, 1), st.integers(1, len(graph.anchors)))
        rows[number] = row.model_copy(update={kind: data.draw(place)})
    kept = {each.tensor for each in rows}
    gradients = tuple(each for each in schedule.gradients if each.id in kept)
    return kind, schedule.model_copy(update={"actions": tuple(rows), "gradients": gradients})


@given(for_the_host())
def test_what_leaves_brings_the_replica_on(case: tuple[Graph, Schedule]) -> None:
    """With the state of the iteration before it makes that of each iteration, and was read in time."""
    graph, schedule = case
    verify(schedule, graph)
    event(f"of {len(graph.written_state)} tensors {len(schedule.rebuilt())} stay, held: {schedule.held_bytes() > 0}")
    assert schedule.certificate.replay_ns == 0
    check_brought_on(schedule, graph)


def check_brought_on(schedule: Schedule, graph: Graph) -> None:
    made, after = restored(schedule, graph, 4, 3), Played(graph, 3).values[-1]
    assert made == {index: after[index] for index in graph.written_state}


@given(case=for_the_host(), data=st.data())
def test_what_leaves_otherwise_is_accepted_only_if_it_brings_the_replica_on(
    case: tuple[Graph, Schedule], data: st.DataObject
) -> None:
    """Rows of other iterations, at other places, without what they hold, or left out."""
    graph, schedule = case
    kind, other = changed(schedule, graph, data)
    accepted = claims(other, graph)
    event(f"{kind}: {'accepted' if accepted else 'refused'}")
    if accepted:
        check_brought_on(other, graph)


@given(in_turn())
def test_what_each_lane_sends_makes_the_state_of_each_iteration(case: tuple[Graph, Schedule]) -> None:
    """Whichever iteration is the last: its lanes' state and gradients are enough, and were read in time."""
    graph, schedule = case
    verify(schedule, graph)
    event(f"lanes: {schedule.lanes}, held: {schedule.held_bytes() > 0}")
    check_each(schedule, graph)


def check_each(schedule: Schedule, graph: Graph) -> None:
    for checkpoint in range(2 * schedule.lanes, 3 * schedule.lanes):
        made = restored(schedule, graph, 4 * schedule.lanes, checkpoint)
        after = Played(graph, checkpoint).values[-1]
        assert made == {index: after[index] for index in graph.written_state}


@given(case=in_turn(), data=st.data())
def test_changed_lanes_are_accepted_only_if_each_iteration_restores(
    case: tuple[Graph, Schedule], data: st.DataObject
) -> None:
    """Rows of other lanes, at other places, without what they hold, or left out."""
    graph, schedule = case
    kind, other = changed(schedule, graph, data, "back alone")
    accepted = claims(other, graph)
    event(f"{kind}: {'accepted' if accepted else 'refused'}")
    if accepted:
        check_each(other, graph)


@given(in_turn())
def test_the_longest_replay_is_said(case: tuple[Graph, Schedule]) -> None:
    """That of a cycle as it is, with the lanes one after the other as the last."""
    graph, schedule = case
    own = schedule.rebuilt()
    lanes, found = schedule.lanes, list[int]()
    for last in range(lanes):
        back = {tensor: (last - lane) % lanes for tensor, lane in own.items()}
        found.append(replayed_ns(graph, back, lanes))
    assert schedule.certificate.replay_ns == max(found)


@given(cases())
def test_its_replay_is_the_updates_made_again(case: tuple[Graph, Schedule]) -> None:
    """Counted iteration by iteration: of each update, the share by size of what is older than that."""
    graph, schedule = case
    state = {row.id for row in schedule.state}
    backs = {row.tensor: row.back for row in schedule.actions if row.tensor in state}
    expected = replayed_ns(graph, backs, schedule.interval)
    event(f"replay: {expected > 0}")
    assert schedule.certificate.replay_ns == expected


def replayed_ns(graph: Graph, back_of: dict[int, int], iterations: int) -> int:
    begins = [a.position for a in graph.anchors if a.kind.value == "optimizer_pre"]
    backs = {index: back_of.get(index, 0) for index in graph.written_state}
    expected = 0
    for begin, end in zip(begins, [*begins[1:], len(graph.ops)], strict=True):
        first = {index: steps[0] for index, steps in graph.writes.items()}
        sizes = {
            index: graph.tensors[index].size_bytes
            for index in backs
            if begin < first[index] <= end and graph.tensors[index].role is not Role.BUFFER
        }
        time_ns = sum(op.time_ns for op in graph.ops[begin:end])
        older = [sum(size for index, size in sizes.items() if backs[index] > n) for n in range(iterations)]
        expected += int(sum(Fraction(time_ns * size, sum(sizes.values())) for size in older if size))
    return expected


@given(cases())
def test_what_is_read_makes_the_state_again(case: tuple[Graph, Schedule]) -> None:
    """Every tensor has the value of the checkpoint's iteration, by the updates that its gradients make again."""
    graph, schedule = case
    verify(schedule, graph)
    event(f"parts: {len({row.back for row in schedule.actions})}")
    checkpoint = 3 * schedule.interval
    made = restored(schedule, graph, checkpoint + 3, checkpoint)
    assert made is not None
    after = Played(graph, checkpoint).values[-1]
    assert made == {index: after[index] for index in graph.written_state}


@given(case=cases(), data=st.data())
def test_a_changed_schedule_is_accepted_only_if_it_restores(case: tuple[Graph, Schedule], data: st.DataObject) -> None:
    """Rows of other iterations, at other places, without what they hold, or fewer gradients."""
    graph, schedule = case
    kind, other = changed(schedule, graph, data, "whole")
    accepted = claims(other, graph)
    event(f"{kind}: {'accepted' if accepted else 'refused'}")
    if accepted:
        checkpoint = 3 * schedule.interval
        after = Played(graph, checkpoint).values[-1]
        assert restored(other, graph, checkpoint + 3, checkpoint) == {i: after[i] for i in graph.written_state}


def claims(schedule: Schedule, graph: Graph) -> bool:
    """Whether verify accepts it, whatever its certificate says of memory."""
    claimed = schedule.certificate
    for _ in range(8):
        try:
            verify(sealed(schedule.model_copy(update={"certificate": claimed})), graph)
        except VerificationError as error:
            name, _, rest = str(error).removeprefix("certificate.").partition(": ")
            if not str(error).startswith("certificate.") or "is claimed" not in rest:
                return False
            found = rest.split(", ")[1].removesuffix(" is found")
            claimed = claimed.model_copy(update={name: float(found) if name == "gap" else int(found)})
        else:
            return True
    raise AssertionError("the certificate cannot be mended")


@given(updates())
def test_parts_are_of_what_is_rebuilt_alone(graph: Graph) -> None:
    """Each parameter is in one part with all that is kept of it, and its gradients are those of the parts after it."""
    problem = problem_of(graph, bandwidth_bytes_per_s=NS)
    units = rebuilt_in(graph)
    event(f"rebuilt: {len(units)}")
    for count in (1, 2, 5):
        sources = over_iterations(problem, graph, count).state
        back = {source.tensor: source.back for source in sources if source.role is not Role.GRADIENT}
        assert back.keys() == set(graph.written_state)
        for unit in units:
            assert len({back[index] for index in unit.state}) == 1
            has = [source.back for source in sources if source.tensor == unit.gradient]
            assert has == list(range(back[unit.state[0]]))
        others = set(back) - {index for unit in units for index in unit.state}
        assert all(back[index] == 0 for index in others)


def row_of(schedule: Schedule, tensor: int) -> ActionRow:
    return next(row for row in schedule.actions if row.tensor == tensor)


@pytest.mark.parametrize("share", [1, 3])
def test_each_iteration_carries_as_much(share: int) -> None:
    """Twelve parameters alike, each with so much more than its gradient: parts differ by one of them at most."""
    from checkflow.graph import Anchor, AnchorKind, Op, Tensor, View

    def view(name: str) -> tuple[View, ...]:
        return (View(name, "uint8", (10,)),)

    names = [f"model/p{number}" for number in range(12)]
    tensors = [Tensor(name, Role.PARAMETER, 10, 0, 3, view(name)) for name in names]
    for entry in range(share - 1):
        tensors += [
            Tensor(f"{name}.{entry}", Role.OPTIMIZER, 10, 0, 3, view(f"optimizer/{name}.{entry}"), name)
            for name in names
        ]
    state = len(tensors)
    tensors += [Tensor(f"{name}'", Role.GRADIENT, 10, 1, 3, (), name) for name in names]
    made, updated = tuple(range(state, len(tensors))), tuple(range(state))
    graph = Graph(
        "m", (), "d", "cpu",
        tuple(Op("op", (), writes, 0, 0, "float32", 100) for writes in (made, (), updated)), tuple(tensors),
        (Anchor(AnchorKind.OPTIMIZER_PRE, "optimizer", 1, 2), Anchor(AnchorKind.ITERATION_END, "", 1, 3)),
    )  # fmt: skip
    sources = over_iterations(problem_of(graph, bandwidth_bytes_per_s=NS), graph, 3).state
    carried = [sum(source.size_bytes for source in sources if source.back == back) for back in range(3)]
    unit = 10 * share
    assert max(carried) - min(carried) <= 2 * unit
