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
