"""The simulator against the runtime's own counters, to the tick, and against a link that moves byte by byte."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
from drawn import graphs
from hypothesis import given
from hypothesis import strategies as st
from stepping import stepped
from virtual import TICKS_PER_BYTE, VirtualRun, attached, graph_of, training_of

from checkflow import policies
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.graph import Graph, Role
from checkflow.plan import Problem, problem_of
from checkflow.policies.rule import Asked
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch
from checkflow.runtime.host import HostDevice
from checkflow.schedule import Schedule
from checkflow.simulation.simulate import play, simulate
from checkflow.verify import verify

NETWORKS = [("alexnet", "sgd"), ("resnet", "adamw"), ("mnasnet", "sgd"), ("transformer", "adamw")]
ITERATIONS = 8


@cache
def traced(network: str, optimizer: str) -> Graph:
    return graph_of(network, optimizer)


def compiled(graph: Graph, room: float, interval: int, policy: str = "checkflow") -> Compiled:
    """For a link that carries `room` times the bytes it has to."""
    size = sum(graph.tensors[i].size_bytes for i in graph.written_state)
    bandwidth = int(room * size * 10**9 / (graph.iteration_time_ns * interval)) + 1
    result = compile_graph(graph, Options(bandwidth, interval=interval, policy=policy))
    assert isinstance(result, Compiled)
    return result


def perturbed(graph: Graph, drift: float, seed: int) -> tuple[list[list[int]], list[int]]:
    """Times of all operators and of the link, for each iteration: faster operators by `drift`, and some noise."""
    rng = random.Random(seed)
    noise = drift / 2
    times = [
        [round(op.time_ns * (1 - drift) * rng.uniform(1 - noise, 1 + noise)) for op in graph.ops]
        for _ in range(ITERATIONS)
    ]
    return times, [round(TICKS_PER_BYTE * (1 + drift * rng.random())) for _ in range(ITERATIONS)]


@pytest.mark.parametrize(("network", "optimizer"), NETWORKS)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("room", [1.02, 1.6])
def test_simulated_and_counted_stalls_are_equal_to_the_tick(
    network: str, optimizer: str, interval: int, room: float
) -> None:
    """In every iteration, by cause, for small and for large drift; and memory stays within the executed peak."""
    graph = traced(network, optimizer)
    made = compiled(graph, room, interval)
    bandwidth = made.problem.bandwidth_bytes_per_s
    assert made.schedule.static_state_bytes == 0
    stalled = []
    for drift in (0.0, 0.05, 0.5):
        times, per_byte = perturbed(graph, drift, seed=interval)
        run = VirtualRun(made.schedule, graph, training_of(network, optimizer), bandwidth)
        counted = [run.iterate(time, one) for time, one in zip(times, per_byte, strict=True)]
        run.close()
        simulated = simulate(made.schedule, made.problem, times, per_byte)
        assert list(simulated.iterations) == counted
        assert run.peak_bytes <= made.schedule.certificate.peak_bytes
        stalled.append(sum(iteration.stalled_ticks for iteration in counted))
    assert stalled[0] == 0
    assert stalled[2] > 0


@pytest.mark.parametrize("policy", ["checkfreq", "checkfreq_cpu", "synchronous"])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("room", [0.4, 1.3])
def test_pauses_are_simulated_and_counted_to_the_tick(policy: str, interval: int, room: float) -> None:
    """Without drift training waits at the pause alone, as long as certified; with any drift both count the same."""
    network, optimizer = NETWORKS[1]
    graph = traced(network, optimizer)
    made = compiled(graph, room, interval, policy)
    bandwidth, claims = made.problem.bandwidth_bytes_per_s, made.schedule.certificate
    for drift in (0.0, 0.05, 0.5):
        times, per_byte = perturbed(graph, drift, seed=interval)
        run = VirtualRun(made.schedule, graph, training_of(network, optimizer), bandwidth)
        counted = [run.iterate(time, one) for time, one in zip(times, per_byte, strict=True)]
        run.close()
        assert list(simulate(made.schedule, made.problem, times, per_byte).iterations) == counted
        assert run.peak_bytes <= claims.peak_bytes
        if not drift:
            stalls = [iteration.stall_ticks for iteration in counted if iteration.stall_ticks]
            assert all(set(one) == {Cause.PAUSE} for one in stalls)
            assert {-(-one[Cause.PAUSE] // bandwidth) for one in stalls} == ({claims.pause_ns} - {0})
            assert (run.peak_bytes == claims.peak_bytes) or not claims.snapshot_bytes


class ThrottledDevice(HostDevice):
    """The real copying thread, on a link that carries so many bytes a second and no more."""

    inline_bytes = -1
    bytes_per_s = 1.0
    _free_s = 0.0

    def _copy(self, batch: Batch, /) -> None:
        began_s = max(self._free_s, time.perf_counter())
        super()._copy(batch)
        self._free_s = began_s + batch.size_bytes / self.bytes_per_s
        time.sleep(max(0.0, self._free_s - time.perf_counter()))


def counted_on_the_host(made: Compiled, bytes_per_s: float, iterations: int) -> int:
    """ns that the host's counters say a training waited whose operators sleep for their times."""
    counters = Counters()
    device = ThrottledDevice(counters)
    device.bytes_per_s = bytes_per_s
    elapsed_ns = [0, *accumulate(op.time_ns for op in made.graph.ops)]
    began_ns = waited_ns = 0

    def arrive(position: int) -> None:
        due_ns = began_ns + elapsed_ns[position] + counters.stall_ns.total() - waited_ns
        time.sleep(max(0, due_ns - time.perf_counter_ns()) / 1e9)

    running = attached(made.schedule, training_of("alexnet", "sgd"), device, counters, arrive)
    for _ in range(iterations):
        began_ns, waited_ns = time.perf_counter_ns(), counters.stall_ns.total()
        running.iterate()
    counted = counters.stall_ns.total()
    running.close()
    return counted


@pytest.mark.parametrize(("slower", "stalls"), [(2, True), (0.25, False)])
def test_simulated_and_counted_stalls_agree_on_the_host(slower: float, stalls: bool) -> None:
    """A real thread, real sleeps: a link of half the bandwidth makes training wait about as long as simulated.

    In the median of five runs: whoever takes the processor meanwhile makes each sleep longer.
    """
    small = traced("alexnet", "sgd")
    iteration_ns, iterations = 80_000_000, 5
    graph = small.retimed("slow", [op.time_ns * iteration_ns // small.iteration_time_ns for op in small.ops])
    made = compiled(graph, 1.2, interval=1)
    times = [made.problem.time_ns] * iterations
    simulated = simulate(made.schedule, made.problem, times, [int(slower * TICKS_PER_BYTE)] * iterations)
    expected = sum(simulated.stall_ns)
    assert expected > iteration_ns if stalls else expected == 0
    least, most = (0.7 * expected, 1.4 * expected) if stalls else (-1, 0.1 * iterations * iteration_ns)
    link = made.problem.bandwidth_bytes_per_s / slower
    counted = statistics.median(counted_on_the_host(made, link, iterations) for _ in range(5))
    assert least < counted < most


PLANNED = st.just("checkflow")
ANY_POLICY = st.sampled_from(policies.names())


@st.composite
def drifted(
    draw: st.DrawFn, policy: st.SearchStrategy[str] = PLANNED
) -> tuple[Graph, Problem, Schedule, list[list[int]], list[int]]:
    """A verified schedule for a link of a byte a ns, and other times for some iterations."""
    graph = draw(graphs(earliest=1))
    buffers = draw(st.sets(st.sampled_from(graph.written_state)))
    graph = replace(
        graph,
        tensors=tuple(replace(t, role=Role.BUFFER) if i in buffers else t for i, t in enumerate(graph.tensors)),
    )
    size = sum(graph.tensors[i].size_bytes for i in graph.written_state)
    interval = -(-size // graph.iteration_time_ns) + draw(st.integers(0, 1))
    problem = problem_of(graph, bandwidth_bytes_per_s=10**9, interval=interval, granule_bytes=draw(st.integers(1, 3)))
    schedule = policies.load(draw(policy)).schedule(problem, graph, Asked(10**9))
    assert isinstance(schedule, Schedule)
    verify(schedule, graph)
    count = draw(st.integers(1, 3 * interval + 2))
    times = draw(
        st.lists(
            st.tuples(*(st.integers(max(0, op.time_ns - 9), op.time_ns + 3) for op in graph.ops)).map(list),
            min_size=count,
            max_size=count,
        )
    )
    per_byte = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    return graph, problem, schedule, times, [TICKS_PER_BYTE * ns for ns in per_byte]


@given(drifted(ANY_POLICY))
def test_events_are_those_of_a_link_that_moves_byte_by_byte(
    case: tuple[Graph, Problem, Schedule, list[list[int]], list[int]],
) -> None:
    """A simulator that goes through every nanosecond, and knows neither queue nor route, finds the same."""
    graph, problem, schedule, times, per_byte = case
    simulated = simulate(schedule, problem, times, per_byte)
    found = [(i.time_ticks, i.stall_ticks) for i in simulated.iterations]
    expected = stepped(schedule, graph, times, [ticks // TICKS_PER_BYTE for ticks in per_byte])
    assert found == [
        (time_ns * 10**9, {cause: ns * 10**9 for cause, ns in stalls.items()}) for time_ns, stalls in expected
    ]


@given(drifted())
def test_a_verified_schedule_does_not_stall_without_drift(
    case: tuple[Graph, Problem, Schedule, list[list[int]], list[int]],
) -> None:
    """What verify accepts runs without a wait, and the link repeats from the second checkpoint on."""
    _, problem, schedule, _, _ = case
    simulated = simulate(schedule, problem, [problem.time_ns] * (6 * problem.interval))
    assert simulated.stall_ns_by_cause == {}
    assert simulated.passages == play(schedule, problem)
    assert [one.moved for one in simulated.passages] == list(schedule.actions)


@given(drifted(), st.integers(1, 10**9), st.data())
def test_a_slower_link_and_faster_operators_never_stall_less(
    case: tuple[Graph, Problem, Schedule, list[list[int]], list[int]], slower: int, data: st.DataObject
) -> None:
    """In all iterations together; one of them may, because the one before has waited already."""
    _, problem, schedule, times, per_byte = case
    number = data.draw(st.integers(0, len(times) - 1))

    def stalled(times: list[list[int]], per_byte: list[int]) -> int:
        return sum(i.stalled_ticks for i in simulate(schedule, problem, times, per_byte).iterations)

    before = stalled(times, per_byte)
    per_byte[number] += slower
    assert stalled(times, per_byte) >= before
    before = stalled(times, per_byte)
    times[number] = [time_ns - data.draw(st.integers(0, time_ns)) for time_ns in times[number]]
    assert stalled(times, per_byte) >= before


def test_figures_that_make_no_sense_are_refused() -> None:
    """Times for other operators, a link that takes no time, a schedule of another graph."""
    graph = traced("alexnet", "sgd")
    made = compiled(graph, 2, interval=1)
    other = problem_of(traced("transformer", "adamw"), bandwidth_bytes_per_s=1)
    times = list(made.problem.time_ns)
    with pytest.raises(InputError, match="iteration 2 has"):
        simulate(made.schedule, made.problem, [times, times[1:]])
    with pytest.raises(InputError, match="the least -1"):
        simulate(made.schedule, made.problem, [[-1, *times[1:]]])
    with pytest.raises(InputError, match="ticks_per_byte"):
        simulate(made.schedule, made.problem, [times], [0])
    with pytest.raises(InputError, match="not of this graph"):
        simulate(made.schedule, other, [times])
