"""The policy that loses least: each one is compiled, what it costs is predicted, and the least is taken.

What is predicted is the share of time that is wasted: on stalls, on copies in device memory, on iterations done again,
and on coming back after a failure. What does not keep to a limit (link, device memory, host memory) is no option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from checkflow import policies
from checkflow.compiler import AUTO, Compiled, Options, Refused, check_ranks, compile_graph
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.plan.infeasible import MOST_INTERVAL
from checkflow.simulation.costs import NS_PER_S, Costs, costs_of
from checkflow.simulation.expected import Expected, expected
from checkflow.spelling import option
from checkflow.units import format_ns, size_and_excess

SLOTS = 3  # checkpoints that host memory has room for: attach's default
_TRIES = 3  # longer intervals, each the best by what the one before cost
_MORE_LANES = (1.5, 2.0, 3.0)  # times the fewest: less on the link in each iteration, more updates to make again
_ALIKE = 1.01  # times the least: what wastes no more is chosen from by memory

Compile = Callable[[Graph, Options, Callable[[str], None]], Compiled | Refused]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What may fail, and what a checkpoint goes to."""

    mtbf_ns: int  # mean time between failures, of all devices together
    disk_bytes_per_s: int = 2 * 10**9
    lost_machines: float = 0.5  # share of the failures that take host memory along; the others kill a trainer
    host_memory_bytes: int | None = None  # for checkpoints; None: no limit
    approximate: bool = False  # what the host's updates make need not be the training's to the bit
    restart_ns: int = 30 * NS_PER_S  # of a killed trainer, until it restores
    replace_ns: int = 300 * NS_PER_S  # of a lost machine, likewise

    def __post_init__(self) -> None:
        if self.mtbf_ns < 1:
            raise InputError("mean time between failures: is not positive; write it like 3h")
        if not 0 <= self.lost_machines <= 1:
            raise InputError(f"lost machines: {self.lost_machines} is not in [0, 1]; 0.5 is every other failure")


@dataclass(frozen=True)
class Option:
    """A policy at an interval, and what it costs."""

    compiled: Compiled
    costs: Costs  # a stall of it is the pause and the copies in device memory
    expected: Expected
    host_bytes: int  # of the slots

    @property
    def policy(self) -> str:
        return self.compiled.schedule.policy

    @property
    def interval(self) -> int:
        return self.compiled.schedule.interval

    @property
    def lanes(self) -> int:
        return self.compiled.schedule.lanes

    @property
    def added_bytes(self) -> int:
        """On top of the training peak, in device memory."""
        claims = self.compiled.schedule.certificate
        return claims.peak_bytes - claims.training_peak_bytes


@dataclass(frozen=True)
class Comparison:
    """All that was looked at."""

    options: tuple[Option, ...]  # the chosen one first, then by what they waste
    refused: tuple[tuple[str, str], ...]  # policies without an option, and why


def choose(
    graph: Graph,
    options: Options,
    amid: Surroundings,
    copy_ns: Callable[[int], int | None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
    compiling: Compile = compile_graph,
    host_ns: Callable[[int], int | None] = lambda _: None,
) -> Comparison:
    """Compile each policy, at the interval asked for or where it wastes least, and put the best first.

    Args:
        graph: with times.
        options: the same for all; its policy plays no part.
        amid: what fails, how often, and where checkpoints go.
        copy_ns: what copying so many bytes within the device takes; None where that is not known, which is free then.
        progress: told, in a few words, what goes on.
        compiling: compile_graph, or what remembers its answers, where several are chosen for.
        host_ns: what the host takes to make the updates of so many bytes of state; None where that is not known.

    Raises what compile_graph raises.
    """
    check_ranks(AUTO, graph.world_size, divided=graph.divided)
    trial = _Trial(graph, options, amid, copy_ns, progress, compiling, host_ns)
    found: list[Option] = []
    refused: list[tuple[str, str]] = []
    for name in policies.names():
        if graph.world_size > 1 and policies.is_of_one_process(name):
            refused.append((name, f"it is for one process, and these are {graph.world_size} ranks"))
            continue
        its = list(trial.options_of(name))
        fitting = [each for each in its if isinstance(each, Option)]
        found += fitting
        if not fitting:
            refused.append((name, next(each for each in its if isinstance(each, str))))
    if found:
        least = min(found, key=lambda one: one.expected.wasted)
        alike = [each for each in found if each is least or each.expected.wasted <= least.expected.wasted * _ALIKE]
        best = min(alike, key=lambda one: (one.added_bytes, one.host_bytes, one.expected.wasted, one.policy))
        found = [best, *sorted((each for each in found if each is not best), key=lambda one: one.expected.wasted)]
    return Comparison(tuple(found), tuple(refused))


@dataclass(frozen=True)
class _Trial:
    """What `choose` was asked; it tries one policy after the other."""

    graph: Graph
    options: Options
    amid: Surroundings
    copy_ns: Callable[[int], int | None]
    progress: Callable[[str], None]
    compiling: Compile
    host_ns: Callable[[int], int | None]

    def options_of(self, policy: str) -> Iterator[Option | str]:
        """At the interval asked for, or the least that works and longer ones by what a checkpoint costs; or why not.

        A plan changes little with a longer interval, so the best one by the costs of the last is tried next. Where the
        link needs lanes, more of them than the fewest are tried, too.
        """
        asked = self.options.interval
        tried: set[int] = set()
        while len(tried) <= _TRIES:
            found = self._compiled(policy, asked)
            yield found
            yield from self._with_more_lanes(found)
            if isinstance(found, str) or self.options.interval is not None:
                return
            tried |= {asked or found.interval, found.interval}
            asked = self._best_interval(found.costs, min(tried), policies.longest(policy) or MOST_INTERVAL)
            if asked in tried:
                return

    def _with_more_lanes(self, found: Option | str) -> Iterator[Option]:
        if isinstance(found, str) or found.lanes == 1:
            return
        most = policies.most_lanes(found.policy) or 1
        for lanes in sorted({round(found.lanes * more) for more in _MORE_LANES}):
            if found.lanes < lanes <= most and isinstance(other := self._compiled(found.policy, 1, lanes), Option):
                yield other

    def _compiled(self, policy: str, interval: int | None, lanes: int | None = None) -> Option | str:
        self.progress(
            f"trying {policy}"
            + (f" at interval {interval}" if interval else "")
            + (f" in {lanes} lanes" if lanes else "")
        )
        options = replace(self.options, policy=policy, interval=interval, lanes=lanes)
        compiled = self.compiling(self.graph, options, self.progress)
        if isinstance(compiled, Refused):
            return compiled.answer.detail
        schedule, amid = compiled.schedule, self.amid
        costs = costs_of(schedule, amid.disk_bytes_per_s, restart_ns=amid.restart_ns, replace_ns=amid.replace_ns)
        host_bytes = SLOTS * (costs.disk_bytes + (costs.link_bytes if schedule.replica else 0))
        if amid.host_memory_bytes is not None and host_bytes > amid.host_memory_bytes:
            return f"its checkpoints take {size_and_excess(host_bytes, amid.host_memory_bytes)} of host memory"
        if schedule.replica and (why := self._not_on_host(costs)):
            return why
        copies_ns = (self.copy_ns(schedule.copied_bytes()) or 0) // schedule.lanes
        costs = replace(costs, stall_ns=costs.stall_ns + copies_ns)
        return Option(compiled, costs, expected(costs, amid.mtbf_ns, amid.lost_machines), host_bytes)

    def _not_on_host(self, costs: Costs) -> str:
        """Why the host cannot make the updates that training makes."""
        if not self.amid.approximate:
            return f"what the host's updates make is not a GPU's to the bit; {option('approximate', True)} takes that"
        update_ns = self.host_ns(costs.disk_bytes)
        if update_ns is None:
            return "what its updates take the host is not known: the device's profile has no network"
        if update_ns > costs.iteration_ns:
            takes, each = format_ns(update_ns), format_ns(costs.iteration_ns)
            return f"the host's updates take it {takes} an iteration, which is one of {each}"
        return ""

    def _best_interval(self, costs: Costs, least: int, longest: int) -> int:
        """Of those from the least that works on, each a fifth longer than the one before."""
        tried, interval = [least], least
        while (interval := max(interval + 1, interval * 6 // 5)) <= longest:
            tried.append(interval)
        amid = self.amid
        return min(
            tried,
            key=lambda each: expected(replace(costs, interval=each), amid.mtbf_ns, amid.lost_machines).wasted,
        )
