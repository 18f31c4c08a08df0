"""Random graphs with a link that carries their state, and what it means to cover the state once."""

from __future__ import annotations

from hypothesis import strategies as st

from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.plan import Chunk, Problem, problem_of

NS = 10**9


@st.composite
def graphs(draw: st.DrawFn, earliest: int) -> Graph:
    """A few operators, some of no duration, with state written anywhere from a step on and anchors anywhere."""
    steps = draw(st.integers(earliest, 6))
    writes: list[list[int]] = [[] for _ in range(steps)]
    tensors = []
    for index in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 30))
        tensors.append(Tensor(f"s{index}", Role.PARAMETER, size, 0, steps, (View(f"s{index}", "uint8", (size,)),)))
        for step in draw(st.sets(st.integers(earliest, steps), min_size=index == 0, max_size=3)):
            writes[step - 1].append(index)
    for _ in range(draw(st.integers(0, 3))):
        born = draw(st.integers(1, steps))
        tensors.append(Tensor("x", Role.ACTIVATION, draw(st.integers(0, 40)), born, draw(st.integers(born, steps))))
    times = draw(st.lists(st.sampled_from((0, 5, 10, 50)), min_size=steps, max_size=steps))
    times[draw(st.integers(0, steps - 1))] += 10
    positions = sorted(draw(st.sets(st.integers(0, steps - 1))))
    return Graph(
        model="random",
        arguments=(),
        device="d",
        traced_on="cpu",
        ops=tuple(Op("op", (), tuple(w), 0, 0, "float32", ns) for w, ns in zip(writes, times, strict=True)),
        tensors=tuple(tensors),
        anchors=(
            *(Anchor(AnchorKind.FORWARD, "m", number, p) for number, p in enumerate(positions, start=1)),
            Anchor(AnchorKind.ITERATION_END, "", 1, steps),
        ),
    )


@st.composite
def problems(
    draw: st.DrawFn, earliest: int = 1, spare: tuple[int, ...] = (0, 1, NS // 3, NS, 40 * NS)
) -> tuple[Graph, Problem]:
    """A graph and a link that carries its state in a period, with so many bytes a second to spare."""
    graph = draw(graphs(earliest))
    interval = draw(st.integers(1, 3))
    size = sum(graph.tensors[i].size_bytes for i in graph.written_state)
    least = -(-size * NS // (interval * graph.iteration_time_ns))
    problem = problem_of(
        graph,
        bandwidth_bytes_per_s=least + draw(st.sampled_from(spare)),
        interval=interval,
        granule_bytes=draw(st.sampled_from((1, 3))),
        chunk_bytes=draw(st.sampled_from((None, 9))),
    )
    return graph, problem


def covers(problem: Problem, pieces: list[Chunk]) -> bool:
    """Byte by byte."""
    counts = [[0] * state.size_bytes for state in problem.state]
    for piece in pieces:
        end = piece.offset_bytes + piece.size_bytes
        if piece.size_bytes < 1 or piece.offset_bytes < 0 or end > len(counts[piece.state]):
            return False
        if piece.offset_bytes % problem.granule_bytes or piece.size_bytes > (problem.chunk_bytes or end):
            return False
        for byte in range(piece.offset_bytes, end):
            counts[piece.state][byte] += 1
    return all(count == 1 for tensor in counts for count in tensor)


@st.composite
def updates(draw: st.DrawFn) -> Graph:
    """Parameters with what optimizers keep of them, their gradients, and anchors where each update begins.

    Some are written by several updates, some have no gradient, one that is zeroed in place, or of another size; some
    gradients go at the next iteration's beginning, some before. What is not rebuilt has to be told apart.
    """
    before, count = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    lengths = [draw(st.integers(1, 3)) for _ in range(count)]
    steps = before + sum(lengths) + draw(st.integers(0, 1))
    begins = [before + sum(lengths[:number]) for number in range(count)]
    writes: list[list[int]] = [[] for _ in range(steps)]
    tensors: list[Tensor] = []

    def add(tensor: Tensor, *at: int) -> None:
        for step in at:
            writes[step - 1].append(len(tensors))
        tensors.append(tensor)

    for number in range(draw(st.integers(1, 4))):
        size, name = draw(st.integers(1, 20)), f"model/p{number}"
        update = draw(st.integers(0, count - 1))
        within = st.integers(begins[update] + 1, begins[update] + lengths[update])
        anywhere = draw(st.integers(0, 7)) == 0
        at = draw(st.sets(st.integers(1, steps) if anywhere else within, min_size=1, max_size=2))
        add(Tensor(name, Role.PARAMETER, size, 0, steps, (View(name, "uint8", (size,)),)), *at)
        for entry in range(draw(st.integers(0, 2))):
            of = draw(st.sampled_from((name, name, name, "")))
            view = View(f"optimizer/p{number}.e{entry}", "uint8", (size,))
            at = draw(
                st.sets(st.integers(1, steps) if draw(st.integers(0, 7)) == 0 else within, min_size=1, max_size=2)
            )
            add(Tensor(view.name, Role.OPTIMIZER, size, 0, steps, (view,), of), *at)
        kind = draw(st.sampled_from(("fresh", "fresh", "fresh", "fresh", "in place", "none", "other size", "late")))
        if kind == "in place":
            written = draw(st.sets(st.integers(1, before), min_size=1, max_size=2))
            zeroed = draw(st.sets(st.integers(before + 1, steps), max_size=1))
            add(Tensor(f"g{number}", Role.GRADIENT, size, 0, steps, (), name), *written, *zeroed)
            if draw(st.booleans()):  # what is copied there, as into DDP's bucket
                born = draw(st.integers(1, before))
                add(Tensor(f"t{number}", Role.GRADIENT, size, born, draw(st.integers(born, before)), (), name), born)
        elif kind != "none":
            born = draw(st.integers(1, before))
            last = draw(st.integers(born, before)) if kind != "late" else draw(st.integers(born, steps))
            stays = draw(st.booleans())
            freed = steps if stays else draw(st.integers(max(last, begins[0]), steps))
            size += kind == "other size"
            add(Tensor(f"g{number}", Role.GRADIENT, size, born, freed, (), name), born, last)
            if stays and draw(st.booleans()):  # what the iteration before left
                gone = draw(st.integers(0, born - 1))
                add(Tensor(f"old{number}", Role.GRADIENT, size, 0, gone, (), name))
    for _ in range(draw(st.integers(0, 2))):
        born = draw(st.integers(1, steps))
        add(Tensor("x", Role.ACTIVATION, draw(st.integers(0, 40)), born, draw(st.integers(born, steps))))
    others = draw(st.sets(st.integers(0, steps - 1))) - set(begins)
    anchors = [Anchor(AnchorKind.OPTIMIZER_PRE, "optimizer", n, p) for n, p in enumerate(begins, start=1)]
    anchors += [Anchor(AnchorKind.FORWARD, "m", n, p) for n, p in enumerate(sorted(others), start=1)]
    times = draw(st.lists(st.sampled_from((5, 10, 50)), min_size=steps, max_size=steps))
    return Graph(
        model="random",
        arguments=(),
        device="d",
        traced_on="cpu",
        ops=tuple(
            Op("op", (), tuple(sorted(set(w))), 0, 0, "float32", ns) for w, ns in zip(writes, times, strict=True)
        ),
        tensors=tuple(tensors),
        anchors=(*sorted(anchors, key=lambda a: a.position), Anchor(AnchorKind.ITERATION_END, "", 1, steps)),
    )
