"""MODEL -> proven schedule: what `checkflow compile` and checkflow.compile share, and the latter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Literal, TypeVar

from checkflow import policies
from checkflow.choice import Comparison, Surroundings, choose
from checkflow.compiler import (
    AUTO,
    CHECKFLOW,
    Compiled,
    Options,
    Refused,
    check_interval,
    check_lanes,
    check_policy,
    check_ranks,
    compile_graph,
    explain,
)
from checkflow.errors import InfeasibleError, InputError, shown
from checkflow.given import FLAG, FUNCTION, Kind, check_kinds, check_path, check_word
from checkflow.jsonfile import check_outputs
from checkflow.plan import Formulation, Transfers
from checkflow.plan.packed.program import solvers
from checkflow.plan.solve import transfers_for
from checkflow.schedule import Schedule, write_schedule
from checkflow.sources import inputs_of
from checkflow.spelling import in_python, option
from checkflow.timedgraph import Model, TimedGraph, traced
from checkflow.trace import World, world_of
from checkflow.units import fraction_ppm, parse_bytes, parse_ns, parse_rate, real_number, whole_number

Word = TypeVar("Word", bound=StrEnum)
_KINDS = {
    "arguments": Kind((Mapping,), "a dict of values by name", may_be_none=True),
    "mtbf": Kind((str,), 'a time with its unit, like "3h"', may_be_none=True),
    "policy": Kind((str,), "its name"),
    "progress": FUNCTION,
} | dict.fromkeys(("real", "divided", "relax_memory", "factors", "approximate"), FLAG)


@dataclass(frozen=True)
class CompileOutcome:
    """What came of a MODEL."""

    timed: TimedGraph
    options: Options
    result: Compiled | Refused
    comparison: Comparison | None = None  # where the policy was left open: what there was to choose from


def compile_model(
    model: Model,
    settings: Mapping[str, object],
    *,
    device: str | None,
    real: bool,
    world: World | None = None,
    bandwidth_bytes_per_s: int | None,
    options: Callable[[int], Options],
    amid: Surroundings | None,
    progress: Callable[[str], None],
) -> CompileOutcome:
    """Trace MODEL (or read its graph), plan, verify. `options` takes the link's bandwidth, which may be the device's.

    With `amid` the policy is that which loses least in these surroundings, and that of the options plays no part but
    where none can do anything: then it says why.

    Raises as `traced` and `compile_graph` do.
    """
    timed = traced(model, settings, device, real=real, world=world, progress=progress)
    chosen = options(timed.bandwidth_bytes_per_s(bandwidth_bytes_per_s))
    if amid is None:
        return CompileOutcome(timed, chosen, compile_graph(timed.graph, chosen, progress))
    comparison = choose(timed.graph, chosen, amid, timed.copy_ns, progress, host_ns=timed.host_ns)
    if comparison.options:
        return CompileOutcome(timed, chosen, comparison.options[0].compiled, comparison)
    result = compile_graph(timed.graph, chosen, progress)
    if isinstance(result, Refused):
        return CompileOutcome(timed, chosen, result, comparison)
    raise InfeasibleError(
        f"{timed.graph.model}: infeasible (host memory): {dict(comparison.refused)[result.schedule.policy]}; "
        f"raise {option('host_memory')}",
        reason="host memory",
        needed_bandwidth_bytes_per_s=None,
        smallest_interval=None,
    )


def check_options(options: Options, policy: str, world: World | None) -> None:
    """Raises InputError, before anything is traced, for what makes no sense alone, together, or beside the others.

    `policy`: as it was asked for, which may be auto; `options`: of any bandwidth.
    """
    transfers = transfers_for(options.formulation, options.transfers)
    check_policy(policy, options.formulation, options.transfers, options.solver)
    check_lanes(policy, options.lanes, options.interval)
    check_interval(options.interval)
    if world is not None:
        check_ranks(policy, world.size, divided=world.divided)
    if options.solver != "auto" and transfers is Transfers.STREAMING:
        raise InputError(
            f"{option('solver', options.solver)}: streaming transfers need none; leave it out, or use "
            f"{option('transfers', 'packed')}"
        )
    if not options.factors and policy != AUTO and not policies.sends_gradients(policy):
        raise InputError(
            f"{option('factors', False)}: policy {policy} sends no gradients; leave it out, or use "
            f"{option('policy', 'rolling')}"
        )
    if options.relax_memory and options.memory_limit_bytes is None:
        raise InputError(
            f"{option('relax_memory', True)}: there is no limit to raise; give {option('memory_limit')}, too"
        )


def surroundings(
    policy: str,
    *,
    mtbf_ns: int | None,
    disk_bytes_per_s: int | None,
    lost_machines: float | None,
    host_memory_bytes: int | None,
    approximate: bool | None,
) -> Surroundings | None:
    """Those that policy auto chooses in; None for any other. Raises InputError where one is given without the other."""
    given = {
        "disk_bytes_per_s": disk_bytes_per_s,
        "lost_machines": lost_machines,
        "host_memory_bytes": host_memory_bytes,
        "approximate": approximate,
    }
    if policy != AUTO:
        if any(value is not None for value in (mtbf_ns, *given.values())):
            names = ", ".join(option(name) for name in ("mtbf", "disk", "lost_machines", "host_memory", "approximate"))
            raise InputError(f"{names}: a choice needs them; give {option('policy', AUTO)}, too")
        return None
    if mtbf_ns is None:
        raise InputError(
            f"{option('policy', AUTO)}: chooses by how often training fails; give {option('mtbf')}, like 3h"
        )
    return Surroundings(mtbf_ns, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def refusal(model: str, refused: Refused) -> str:
    """The line that a person gets where no plan exists."""
    return f"{model}: {explain(refused)}"


@in_python()
def compile(
    model: Model,
    *,
    arguments: Mapping[str, object] | None = None,
    device: str | None = None,
    real: bool = False,
    world_size: int | None = None,
    rank: int | None = None,
    divided: bool = False,
    bandwidth: int | str | None = None,
    memory_limit: int | str | None = None,
    relax_memory: bool = False,
    chunk: int | str | None = None,
    interval: int | Literal["auto"] = "auto",
    slack: float = 0.0,
    policy: str = "checkflow",
    lanes: int | None = None,
    factors: bool = True,
    mtbf: str | None = None,
    disk: int | str | None = None,
    lost_machines: float | None = None,
    host_memory: int | str | None = None,
    approximate: bool = False,
    formulation: str = "direct",
    transfers: str | None = None,
    solver: str = "auto",
    time_limit_s: float = 300.0,
    output: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Schedule:
    """Trace a training iteration and plan when each byte of its state is checkpointed, as `checkflow compile` does.

        schedule = checkflow.compile(training, bandwidth="25GB/s")
        with checkflow.attach(model, optimizer, schedule=schedule, store="checkpoints") as ckpt:

    Nothing of the process's own changes: the iteration runs on fake tensors where that is possible, and the random
    generators and the working directory are left as they were. A Training that is there is run, three iterations of it.

    Args:
        model: a function that builds a checkflow.Training, or a Training; "model.py", "model.py:factory" or the name of
            a bundled network; or a traced graph, read or as a path that ends in .json.
        arguments: of the function, by name: text, numbers, True, False or None.
        device: profile whose times the operators get, by name or as a YAML file, or "measure": time them on this
            machine. rtx3090 unless given; the times that a graph has, or that a Training that is there took.
        real: trace with real tensors. Where data decide what runs, this happens by itself.
        world_size: run the function as one of so many ranks, over a process group that moves nothing; it is called with
            torch.distributed initialized. The device's profile has to have a network.
        rank: of these, the one to trace; the first unless given.
        divided: each rank saves a share of what they have alike, as with DistributedDataParallel, and each needs its
            own schedule. They have to share a disk.
        bandwidth: of the link to the host, "63GB/s" or bytes per second; the device's unless given.
        memory_limit: largest peak that is allowed, "40GiB" or bytes.
        relax_memory: raise the memory limit by 5% until a plan keeps to it.
        chunk: largest chunk, "16MiB" or bytes; as large as the plan allows unless given.
        interval: iterations between checkpoints; "auto": the fewest that the link allows, and 1 of what is `divided`:
            each share would allow another, and all ranks have to have the same.
        slack: drift of times and bandwidth to tolerate; 0.1 is 10%.
        policy: "checkflow"; or another tool's rule, "checkfreq", "checkfreq_cpu" or "synchronous", which leaves nothing
            to choose. With those "auto" is the interval at which training stands still least. "gockpt" takes
            `interval` iterations for one checkpoint, which leaves in parts; "rolling" has one after each iteration,
            of which each sends a part, where the link cannot carry it whole; "lowdiff" has one, too, of which one
            iteration in K sends the whole state and the others gradients; "lowdiff_plus" sends gradients alone, and the
            host makes the updates, too. "auto" is the one of all these that
            wastes least, at the interval at which it does.
        lanes: of "rolling" and "lowdiff", iterations of which each sends a part; as few as the link needs unless given.
        factors: of these and "gockpt", whether a linear layer's gradient may leave as the two tensors that it is the
            product of.
        mtbf: with policy "auto", mean time between failures of all devices together, like "3h".
        disk: with policy "auto", what a device's share of it writes, "2GB/s" (the default) or bytes per second.
        lost_machines: with policy "auto", share of the failures that take host memory along; 0.5 unless given.
        host_memory: with policy "auto", the most that checkpoints may take there, "64GiB" or bytes.
        approximate: with policy "auto", whether "lowdiff_plus" is one to choose: the updates that the host makes differ
            from a GPU's in the last bits.
        formulation: "direct", "compact" or "paper".
        transfers: "streaming" or "packed"; streaming for direct, else packed, unless given.
        solver: "auto", "gurobi", "highs" or "cbc".
        time_limit_s: for the solver, each time it is asked.
        output: where to write the schedule, too.
        progress: told, in a few words, what goes on.

    Raises:
        InfeasibleError: no plan exists; says why, and what would do.
        InputError: an argument, a file or the training is wrong.
        SolverError: the solver that was asked for cannot run.
    """
    check_kinds(_KINDS, locals())
    kind = _one_of(Formulation, formulation, "formulation")
    asked = None if transfers is None else _one_of(Transfers, transfers, "transfers")
    check_word("solver", solver, ("auto", *solvers()))
    device = None if device is None else check_path("device", device, "a profile's name, or its file")
    written = None if output is None else Path(check_path("output", output))
    time_limit_s = real_number(time_limit_s, "time_limit_s", "use a number of seconds")
    if not time_limit_s > 0:
        raise InputError(f"time_limit_s: {time_limit_s} is not positive; use a number of seconds")
    options = partial(
        Options,
        interval=_interval(interval),
        chunk_bytes=_parsed(parse_bytes, chunk, "chunk"),
        memory_limit_bytes=_parsed(parse_bytes, memory_limit, "memory_limit"),
        relax_memory=relax_memory,
        slack_ppm=fraction_ppm(real_number(slack, "slack", "0.1 tolerates 10% drift"), "slack"),
        policy=CHECKFLOW if policy == AUTO else policy,
        lanes=None if lanes is None else whole_number(lanes, "lanes", "give 2 or more"),
        factors=factors,
        formulation=kind,
        transfers=transfers_for(kind, asked),
        solver=solver,
        time_limit_s=time_limit_s,
    )
    world = world_of(
        None if world_size is None else whole_number(world_size, "world_size", "give how many ranks there are"),
        None if rank is None else whole_number(rank, "rank", "give that of one of them"),
        divided=divided,
        entries_stay=policies.sends_gradients(options(1).policy),
    )
    check_options(options(1), policy, world)
    amid = surroundings(
        policy,
        mtbf_ns=None if mtbf is None else parse_ns(mtbf, "mtbf"),
        disk_bytes_per_s=_parsed(parse_rate, disk, "disk"),
        lost_machines=(
            None if lost_machines is None else real_number(lost_machines, "lost_machines", "0.5 is every other failure")
        ),
        host_memory_bytes=_parsed(parse_bytes, host_memory, "host_memory"),
        approximate=approximate or None,
    )
    if written is not None:
        check_outputs(inputs_of([model], [device]), written)
    outcome = compile_model(
        model,
        {} if arguments is None else arguments,
        device=device,
        real=real,
        world=world,
        bandwidth_bytes_per_s=_parsed(parse_rate, bandwidth, "bandwidth"),
        options=options,
        amid=amid,
        progress=progress,
    )
    result = outcome.result
    if isinstance(result, Refused):
        answer = result.answer
        raise InfeasibleError(
            refusal(outcome.timed.graph.model, result),
            reason=answer.reason.value,
            needed_bandwidth_bytes_per_s=answer.needed_bandwidth_bytes_per_s,
            smallest_interval=answer.smallest_interval,
        )
    if written is not None:
        write_schedule(written, result.schedule)
    return result.schedule


def _one_of(kind: type[Word], text: str, what: str) -> Word:
    check_word(what, text, kind)
    return kind(text)


def _parsed(parse: Callable[[str, str], int], given: object, what: str) -> int | None:
    """A size or a rate, as a person writes it or a number; None stays."""
    if given is None:
        return None
    if isinstance(given, str):
        return parse(given, what)
    advice = f"write it like {'63GB/s' if parse is parse_rate else '16MiB'}"
    number = whole_number(given, what, advice) if isinstance(given, Integral) else real_number(given, what, advice)
    return parse(str(number), what)


def _interval(given: int | str) -> int | None:
    if isinstance(given, str) and given == "auto":
        return None
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InputError(f"interval: {shown(given)} is neither a positive whole number nor 'auto'; use one of these")
    return whole_number(given, "interval", "use a smaller one")
