"""SIGKILL of the trainer at random moments, again and again: each state is bit-identical, and little is lost."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
import trainer_to_kill
import trainings_to_kill
from processes import children, command
from programs import HANGS_S, Program
from slow_link import copies_take

import checkflow
from checkflow import hardware, policies
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graph import Graph
from checkflow.learning.kept import FOLDER
from checkflow.lower import lower
from checkflow.plan import Formulation, Plan, on_anchors, problem_of
from checkflow.plan.rebuilt import for_replica, in_lanes, over_iterations
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.schedule import Schedule, read_schedule, write_schedule
from checkflow.trace import trace_training
from checkflow.verify import verify

TRAINER = Path(__file__).with_name("trainer_to_kill.py")
TRAINERS = Path(__file__).with_name("trainings_to_kill.py")
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
KILLS = 200 if NIGHTLY else 8
SAID, PIPE_BYTES = 60, 4096  # a life says so many iterations at most before it is killed, and then what its pipe holds
EACH = 250  # iterations for each kill
PARTS = 3  # iterations for one checkpoint, where a policy has several
TRAININGS, OPTIMIZERS = list(trainings_to_kill.TRAININGS), list(trainings_to_kill.OPTIMIZERS)
LANED = ("lowdiff", "rolling")  # policies with a checkpoint after each iteration, a part of it in each
SEVERAL = (*LANED, "lowdiff_plus")  # and with several kinds of slots
SEED = random.randrange(10**6) if NIGHTLY else 0
BEHIND = {"cuda": 1}  # the device is, when step() looks: a checkpoint that is whole by then is staged at the next hook
ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
OPTIONS = {
    "cpu": Options(3_000_000_000),  # just enough
    "cuda": Options(12_000_000_000, formulation=Formulation.COMPACT),  # a foreach update has no need of snapshots else
}


@dataclass(frozen=True)
class Kill:
    """So long after the start of a life, or so long after it has said so many iterations: the first of the two."""

    started_s: float
    said: int
    later_s: float
    also: str = ""  # a module whose process, started by it, is killed right before


def _strike(process: Program, also: str) -> None:
    for child in children(process.pid) if also else ():
        if also in command(child):
            os.kill(child, signal.SIGKILL)
    process.send_signal(signal.SIGKILL)


@dataclass
class Life:
    """What one process said before it died or ended: the iterations it printed, with their digests."""

    said: dict[int, str] = field(default_factory=dict)
    first: int = -1  # -1: killed before it said anything
    last: int = -1
    startup_s: float = 0.0


def _live(trainer: Path, arguments: list[str], kill: Kill | None, folder: Path) -> Life:
    """Run the trainer; kill it wherever it is then."""
    life, began = Life(), time.monotonic()
    process = Program(trainer.read_text(), *arguments, stderr=folder / "stderr")
    also = kill.also if kill else ""
    killer = threading.Timer(kill.started_s if kill else HANGS_S, _strike, [process, also])
    killer.start()
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    for line in process.stdout:
        if not line.endswith("\n"):
            break  # cut by the kill
        _, iteration, digest = line.split()
        life.last = int(iteration)
        if not life.said:
            life.first, life.startup_s = life.last, time.monotonic() - began
        life.said[life.last] = digest
        if kill and len(life.said) == kill.said:
            time.sleep(kill.later_s)
            _strike(process, also)
    killer.cancel()
    killer.join()
    code, _ = process.end()
    assert code == (-signal.SIGKILL if kill else 0), process.complaint()
    return life


def _schedule(device: str, path: Path) -> str:
    """Compiled for the trainer, with a plan that has to snapshot some of it."""
    graph = _traced(partial(trainer_to_kill.training, device))
    compiled = compile_graph(graph, OPTIONS[device])
    assert isinstance(compiled, Compiled)
    assert compiled.schedule.certificate.snapshot_bytes
    write_schedule(path, compiled.schedule)
    return str(path)


def _traced(factory: Callable[[], checkflow.Training]) -> Graph:
    traced = trace_training(factory, model="killed", cuda_defaults=False)
    return hardware.retime(traced.graph, hardware.load_profile("rtx3090"))


def _under(policy: str, what: str, path: Path) -> str:
    """A policy's schedule: in parts, or as a whole for a link that carries it, or for one at which its rule pauses."""
    graph = _traced(lambda: trainings_to_kill.build(what).training)
    state_bytes = sum(graph.tensors[index].size_bytes for index in graph.written_state)
    carried = state_bytes * 10**9 // graph.iteration_time_ns
    if policy in ("gockpt", *SEVERAL):
        schedule = _in_parts(graph, policy, 4 * carried)
    else:
        compiled = compile_graph(graph, Options(2 * carried if policy == "checkflow" else carried // 2, policy=policy))
        assert isinstance(compiled, Compiled)
        schedule = compiled.schedule
        assert policy == "checkflow" or schedule.certificate.pause_ns
    write_schedule(path, schedule)
    return str(path)


def _in_parts(graph: Graph, policy: str, bandwidth: int) -> Schedule:
    """Though the plan of the whole needs less memory: an update that is looped takes most of an iteration's time."""
    whole = on_anchors(problem_of(graph, bandwidth_bytes_per_s=bandwidth), graph)
    laned = in_lanes(whole, graph, PARTS, base=policy == "lowdiff", factors=policy == "rolling")
    problem = over_iterations(whole, graph, PARTS) if policy == "gockpt" else laned
    if policy == "lowdiff_plus":
        problem = for_replica(whole, graph)
    assert problem is not None
    plan = plan_streaming(problem)
    assert isinstance(plan, Plan)
    schedule = lower(plan, problem, graph, bandwidth_bytes_per_s=bandwidth, policy=policy)
    verify(schedule, graph)
    assert schedule.replica or len({row.back for row in schedule.actions}) == PARTS
    return schedule


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=ON_CUDA)],
)
def test_killed_again_and_again_it_resumes_bit_identically(device: str, tmp_path: Path) -> None:
    """With any number of slots at most one completed iteration is lost, and every state is the uninterrupted run's."""
    _killed(device, _schedule(device, tmp_path / "schedule.json"), tmp_path, lost=1 + BEHIND.get(device, 0))


def test_killed_while_its_schedule_is_learned_it_resumes_bit_identically(tmp_path: Path) -> None:
    """The same promise in each phase of learning, at interval 1: what was learned is taken away before each life."""
    _killed("cpu", "learned", tmp_path)


def test_killed_while_it_learns_to_save_in_lanes_it_resumes_bit_identically(tmp_path: Path) -> None:
    """The link carries less than the state in an iteration; each has a checkpoint all the same."""
    learning = ["learning", "cpu", "50", "rolling", str(tmp_path / "learning"), "3"]
    _live(TRAINER, learning, None, tmp_path)
    (kept,) = (tmp_path / "learning" / FOLDER).glob("*.schedule.json")
    assert read_schedule(kept).lanes > 1
    _killed("cpu", "rolling", tmp_path, slots="23", kept=kept.parent)


def _sample() -> list[tuple[str, str]]:
    """Each policy with each training and each optimizer nightly; else each policy, training and optimizer somewhere."""
    every = [(p, f"{t}/{o}") for t in TRAININGS for o in OPTIMIZERS for p in policies.names()]
    turns = zip(cycle(policies.names()), cycle([*TRAININGS[-1:], *TRAININGS[:-1]]), OPTIMIZERS, strict=False)
    chosen = {(policy, f"{training}/{optimizer}") for policy, training, optimizer in turns}
    return [one for one in every if NIGHTLY or one in chosen]


CUDA = [(p, "net/fused/cuda") for p in policies.names()]
CUDA += [("checkflow", "gpt/foreach/cuda"), ("rolling", "gpt/foreach/cuda"), ("rolling", "gan/adamw/cuda")]


@pytest.mark.parametrize(("policy", "what"), [*_sample(), *(pytest.param(*each, marks=ON_CUDA) for each in CUDA)])
def test_killed_under_any_policy_it_resumes_bit_identically(policy: str, what: str, tmp_path: Path) -> None:
    """Where training stands still decides what a kill costs, never what is restored."""
    # The last of lowdiff's base leaves in the second iteration after it.
    lost = {"gockpt": 2 * PARTS, "lowdiff": 2}.get(policy, 1) + BEHIND.get(what.rpartition("/")[2], 0)
    slots = "23" if policy in SEVERAL else "123"  # a single one could never complete a checkpoint beside the last
    schedule = _under(policy, what, tmp_path / "schedule.json")
    _killed(what, schedule, tmp_path, TRAINERS, 20 if NIGHTLY else 2, lost, slots)


def test_killed_with_what_brings_its_replica_on_it_loses_no_more(tmp_path: Path) -> None:
    """Its saver starts another one, which makes all that was staged."""
    schedule = _under("lowdiff_plus", "net/foreach", tmp_path / "schedule.json")
    kills = 20 if NIGHTLY else 3
    _killed("net/foreach", schedule, tmp_path, TRAINERS, kills, slots="23", also="checkflow.replica")


def test_gradients_whose_copies_get_no_time_are_one_iteration_late_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No guard waits for them, since nothing writes there: a kill would cost as many iterations as have slots."""
    copies_take(monkeypatch, lambda _: 0.02)
    schedule = _under("lowdiff_plus", "net/foreach", tmp_path / "schedule.json")
    built, late = trainings_to_kill.build("net/foreach"), list[int]()
    with checkflow.attach(
        built.training.model, built.training.optimizer, store=tmp_path / "store", schedule=schedule,
        scheduler=built.schedulers, loader=built.loader, extra=built.training.extra, when_full="wait",
        tell=lambda _: None,
    ) as ckpt:  # fmt: skip
        for completed in range(1, 20):
            built.iterate()
            ckpt.step()
            late.append(completed - ckpt._executor.newest)
    assert max(late) == 1, late


@pytest.mark.parametrize("policy", ["checkflow", "checkfreq"])
def test_killed_while_its_interval_changes_it_resumes_bit_identically(policy: str, tmp_path: Path) -> None:
    """Then a kill loses an interval, the longest that there may be."""
    schedule = _under(policy, "net/foreach", tmp_path / "schedule.json")
    kills = 20 if NIGHTLY else 3
    _killed("net/foreach", schedule, tmp_path, TRAINERS, kills, trainings_to_kill.LONGEST, mode="paced")


def _killed(
    what: str,
    schedule: str,
    tmp_path: Path,
    trainer: Path = TRAINER,
    kills: int = KILLS,
    lost: int = 1,
    slots: str = "123",
    mode: str = "attached",
    also: str = "",
    kept: Path | None = None,
) -> None:
    """`kept`: what every other life has learned before it begins; the others learn it."""
    iterations = EACH * kills  # more than are said in all lives, so that each is killed
    live = partial(_live, trainer, folder=tmp_path)
    reference = _uninterrupted(trainer, what, iterations)
    arguments = [mode, what, str(iterations), schedule, str(tmp_path / "store")]
    chance, completed, startup_s = random.Random(SEED), 0, 3.0
    print(f"seed {SEED}")  # noqa: T201
    for number in range(kills):
        if schedule == "learned" or kept:
            shutil.rmtree(tmp_path / "store" / FOLDER, ignore_errors=True)
        if kept and number % 2:
            shutil.copytree(kept, tmp_path / "store" / FOLDER)
        early = number % 4 == 3  # while it starts, waits for the saver or restores
        began_s = chance.random() * startup_s if early else HANGS_S
        kill = Kill(began_s, chance.randint(1, SAID), chance.random() / 50, also)
        life = live([*arguments, chance.choice(slots)], kill)
        assert early or life.said, "it hangs before its first iteration"
        if life.said:
            _check(life, completed, reference, lost, tmp_path)
            completed, startup_s = life.last, life.startup_s
    final = live([*arguments, "3"], None)
    _check(final, completed, reference, lost, tmp_path)
    assert final.last == iterations


@cache
def _uninterrupted(trainer: Path, what: str, iterations: int) -> dict[int, str]:
    """Each policy's kills are compared with the same run."""
    with tempfile.TemporaryDirectory() as folder:
        return _live(trainer, ["reference", what, str(iterations)], None, Path(folder)).said


def _check(life: Life, completed: int, reference: dict[int, str], lost: int, folder: Path) -> None:
    told = (folder / "stderr").read_text()[-2000:]
    assert life.first >= completed - lost, f"{completed} iterations were completed, {life.first} restored: {told}"
    for iteration, digest in life.said.items():
        assert iteration == 0 or digest == reference[iteration], f"iteration {iteration} differs"
