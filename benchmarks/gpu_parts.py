"""The parts of gpu.py: each yields its rows as it comes to know them."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process that waits for parts imports neither torch nor checkflow before them
    import checkflow

ROOT = Path(__file__).parent.parent
NETWORKS = ("alexnet", "bert", "mnasnet", "resnet", "resnet3d", "transformer", "vgg", "vit", "gpt2", "llama_1b")
TINY_NETWORKS = ("mnasnet", "gpt2", "llama_1b")
COPY_BYTES = 256 * 2**20  # past the caches
ALL_S = 540  # for all parts
ENDING_S = 15.0  # of a part whose time is over, for what it started to end and to say what it has
LEARN_S = 25  # for a schedule to be learned
PEAK, OVERHEAD, LINK = 0.02, 0.01, 0.95  # targets
Factory = Callable[[], "checkflow.Training"]


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, or why there is none. `most` and `least` are its target."""

    subject: str
    figure: str
    value: float | None
    unit: str = ""
    most: float | None = None
    least: float | None = None
    note: str = ""
    part: str = ""

    @property
    def outcome(self) -> str:
        if self.value is None or (self.most is None and self.least is None):
            return ""
        met = (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)
        return "met" if met else "MISSED"


@dataclass(frozen=True, slots=True)
class Here:
    """Where a part runs, and how large what it trains is."""

    device: str  # cuda or host
    tiny: bool
    part_s: float  # that a part may take

    @property
    def torch_device(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu"

    def factory(self, name: str) -> Factory:
        from checkflow import models

        if self.tiny:
            return partial(models.factory(name), batch_size=2, optimizer="adamw_foreach", small=True)
        batch = {"gpt2": 8, "llama_1b": 1}.get(name, 32)
        return partial(models.factory(name), batch_size=batch, optimizer="adamw_foreach")

    def target(self, **of: float) -> dict[str, float]:
        return of if self.device == "cuda" else {}


def tests(here: Here) -> Iterator[Row]:
    """The tests of the suite that need CUDA; on a host they are collected and skipped."""
    workers = ["-n", str(max(4, (os.cpu_count() or 1) - 4))] if find_spec("xdist") else []
    where = ["tests/runtime/test_cuda.py"] if here.tiny else [*workers, "tests"]
    # What plugins of this machine warn of is no failure.
    asked = ["-p", "no:cacheprovider", "-W", "default", "-k", "cuda", "-vv", "--color=no"]
    command = [sys.executable, "-m", "pytest", *asked, *where]
    ran = until(command, here.part_s - ENDING_S)
    if ran.returncode not in (0, 1):
        last = (ran.stdout.strip() or ran.stderr.strip() or "pytest said nothing").splitlines()[-1]
        yield Row("tests -k cuda", "all ran", None, note=f"ended early: {last}")
    if ended := outcomes(ran.stdout):
        broken = sorted(name for name, how in ended.items() if how in ("FAILED", "ERROR"))
        yield Row("tests -k cuda", "failed", len(broken), most=0, note="; ".join(broken))
        for how in ("passed", "skipped"):
            yield Row("tests -k cuda", how, list(ended.values()).count(how.upper()))


def outcomes(said: str) -> dict[str, str]:
    """By the name of each test that has ended, how, as pytest -vv tells it at once: where time is over there may be no
    summary. With xdist a line begins with the worker, and has the outcome before the name."""
    word, name = r"(?P<how>PASSED|FAILED|ERROR|SKIPPED)", r"(?P<name>tests/\S+)"
    lines = rf"^(?:\[gw\d+\] \[ *\d+%\] )?{word} {name}", rf"^{name} {word}"
    return {each["name"]: each["how"] for line in lines for each in re.finditer(line, said, re.MULTILINE)}


def peaks(here: Here) -> Iterator[Row]:
    """Peak memory of an iteration with its checkpoint, as measured, over what the schedule's certificate says."""
    import checkflow

    link = plain_copy_bytes_per_s(here)
    for name in TINY_NETWORKS if here.tiny else NETWORKS:
        try:
            yield _peak(here, name, link)
        except (checkflow.CheckflowError, RuntimeError) as error:  # as of too little memory; the others still fit
            yield Row(name, "peak off predicted", None, note=f"{type(error).__name__}: {str(error)[:200]}")


def _peak(here: Here, name: str, link_bytes_per_s: int) -> Row:
    import torch

    from checkflow.compiler import Compiled, Options, compile_graph
    from checkflow.trace import trace_training

    factory = here.factory(name)
    with torch.device(here.torch_device):
        graph = trace_training(factory, model=name, measure=True).graph
    compiled = compile_graph(graph, Options(link_bytes_per_s, interval=None))
    if not isinstance(compiled, Compiled):
        return Row(name, "peak off predicted", None, note=f"refused: {compiled.answer.reason}")
    gc.collect()
    held = _cuda_bytes("current") if here.device == "cuda" else {}
    with torch.device(here.torch_device):
        training = factory()
    training.iteration()  # makes the optimizer's state
    with attached(training, schedule=compiled.schedule) as (iterate, _):
        return _peak_row(here, Row(name, "peak off predicted", None), iterate, compiled.schedule, held)


def _peak_row(
    here: Here, row: Row, iterate: Callable[[], None], schedule: checkflow.Schedule, held: Mapping[str, int]
) -> Row:
    """The row with its figure: of a training whose checkpoints the schedule has, with what was held before it."""
    import torch

    for _ in range(2 * schedule.interval):
        iterate()
    if here.device != "cuda":
        return replace(row, note="host: memory of a GPU is not measured here")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2 * schedule.interval):
        iterate()
    peak = {kind: found - held[kind] for kind, found in _cuda_bytes("peak").items()}
    predicted, allocated, requested = schedule.certificate.peak_bytes, peak["allocated_bytes"], peak["requested_bytes"]
    note = (
        f"predicted {predicted / 1e6:.1f} MB, measured {allocated / 1e6:.1f} MB, before the allocator rounds up "
        f"{requested / 1e6:.1f} MB, interval {schedule.interval}"
    )
    return replace(row, value=abs(allocated / predicted - 1), unit="of it", most=PEAK, note=note)


def _cuda_bytes(when: str) -> dict[str, int]:
    """What was asked of CUDA's allocator, and what it took for that: now ("current"), or at most ("peak")."""
    import torch

    stats = torch.cuda.memory_stats_as_nested_dict()
    return {kind: stats[kind]["all"][when] for kind in ("allocated_bytes", "requested_bytes")}


def iterations(here: Here) -> Iterator[Row]:
    """A checkpoint at each iteration against none, in turns; the stalls; the link against a plain copy."""
    import overhead

    link = plain_copy_bytes_per_s(here)
    yield Row("plain pinned copy" if here.device == "cuda" else "plain copy", "bandwidth", link / 1e9, "GB/s")
    pairs, count = (2, 2) if here.tiny else (12, 5)
    for name in ("gpt2",):
        found = overhead.measure(here.factory(name), link, pairs, count, persist_every=10**9)
        stats, plain = found.stats, [time_s for turn in found.turns.plain_s for time_s in turn]
        causes = ", ".join(f"{cause} {ns / 1e6:.1f} ms" for cause, ns in stats.stall_ns_by_cause.items() if ns)
        yield Row(name, "iteration without checkpoints", statistics.median(plain) * 1e3, "ms")
        ratio, alike = found.turns.ratio(), found.alike
        note = f"{ratio:.4f}, over {alike:.4f} of the same two trainings without checkpoints"
        yield Row(name, "added by a checkpoint each", ratio / alike - 1, "of it", most=OVERHEAD, note=note)
        yield Row(name, "stall per iteration", stats.stall_per_iteration_ns / 1e6, "ms", note=causes)
        yield Row(name, "host time in hooks per iteration", found.hook_ns / 1e6, "ms")
        if stats.bytes_per_s:
            yield Row(name, "link over plain copy", stats.bytes_per_s / link, "of it", least=LINK)
        else:
            yield Row(name, "link over plain copy", None, note="the link's times were not recorded")


def learned(here: Here) -> Iterator[Row]:
    """A schedule that attach learned from the running training: its certificate, and itself against one compiled."""
    yield _learned_peak(here, "mnasnet" if here.tiny else "resnet3d")
    yield _learned_over_compiled(here, "gpt2")


def _learned_peak(here: Here, name: str) -> Row:
    """Of a network with convolutions, which take memory for themselves."""
    import torch

    figure, factory = "learned peak off predicted", here.factory(name)
    with torch.device(here.torch_device):
        factory().iteration()  # libraries' workspaces are there then, and stay
    gc.collect()
    held = _cuda_bytes("current") if here.device == "cuda" else {}
    with torch.device(here.torch_device):
        training = factory()
    with attached(training) as (iterate, ckpt):
        if _until_learned(iterate, ckpt) is None:
            return Row(name, figure, None, note=f"nothing learned in {LEARN_S} s")
        return _peak_row(here, Row(name, figure, None), iterate, ckpt.schedule, held)


def _learned_over_compiled(here: Here, name: str) -> Row:
    import overhead
    import torch

    from checkflow.compiler import Compiled, Options, compile_graph
    from checkflow.trace import trace_training

    factory, link = here.factory(name), plain_copy_bytes_per_s(here)
    with torch.device(here.torch_device):
        compiled = compile_graph(trace_training(factory, model=name, measure=True).graph, Options(link))
        assert isinstance(compiled, Compiled), "the link is too slow for a checkpoint at every iteration"
        trainings = factory(), factory()
    for training in trainings:
        training.iteration()
    pairs, count = (2, 2) if here.tiny else (10, 5)
    turns = overhead.Turns([], [])
    with (
        attached(trainings[0], schedule=compiled.schedule) as (by_compiled, _),
        attached(trainings[1]) as (by_learned, ckpt),
    ):
        took = _until_learned(by_learned, ckpt)
        if took is None:
            return Row(name, "learned over compiled", None, note=f"nothing learned in {LEARN_S} s")
        for _ in range(pairs + 1):  # the first is not counted
            turns.plain_s.append(overhead.turn(by_compiled, count))
            turns.attached_s.append(overhead.turn(by_learned, count))
    kept = overhead.Turns(turns.plain_s[1:], turns.attached_s[1:])
    return Row(name, "learned over compiled", kept.ratio(), note=f"learned in {took} iterations")


def _until_learned(iterate: Callable[[], None], ckpt: checkflow.Checkpointer) -> int | None:
    """Iterate until a schedule was learned: after how many iterations; None where none was in LEARN_S seconds."""
    began, took = time.monotonic(), 0
    while not ckpt.stats().learned_in:
        if time.monotonic() > began + LEARN_S:
            return None
        iterate()
        took += 1
    return took


def peers(here: Here) -> Iterator[Row]:
    """Other tools on a small net: peers.py measures them properly."""
    workload = "conv-cuda" if here.device == "cuda" and not here.tiny else "tiny"
    tools = "checkflow" if here.tiny else "checkflow,checkfreq,torch_save,dcp_async_thread"
    with memory_folder() as folder:
        output = folder / "peers.json"
        asked = {
            "contenders": tools, "workloads": workload, "parts": "overhead", "tiers": "disk",
            "directory": str(folder), "output": str(output),
        }  # fmt: skip
        words = [word for name, value in asked.items() for word in (f"--{name}", value)]
        ran = until([sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--quick", *words], here.part_s - ENDING_S)
        if not output.exists():
            why = (ran.stderr.strip() or "peers.py said nothing").splitlines()[-1]
            yield Row(workload, "throughput lost", None, note=why)
            return
        report = json.loads(output.read_text())
    missing = {tool["name"]: tool["missing"] for tool in report["tools"] if tool["missing"]}
    for name, why in {**report["skipped"], **missing}.items():
        yield Row(name, "throughput lost", None, note=why)
    for row in report["overheads"]:
        subject, figure = f"{row['contender']}, {workload}", f"throughput lost, each {row['interval']}"
        note = f"over turns {row['low']:.3f} to {row['high']:.3f}, in memory"
        if not row["spread"]:
            note += "; each iteration of a turn over one without: " + " ".join(f"{each:.2f}" for each in row["curve"])
        yield Row(subject, figure, row["loss"], "of it", note=note)


@dataclass(frozen=True, slots=True)
class Part:
    run: Callable[[Here], Iterator[Row]]
    limit_s: int


# ALL_S at most; the tests, which take the longest, have what the others leave.
PARTS = {
    "peaks": Part(peaks, 140),
    "iterations": Part(iterations, 80),
    "learned": Part(learned, 60),
    "peers": Part(peers, 115),
    "tests": Part(tests, 400),
}


# What parts share


def until(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command; interrupted as by Ctrl-C when its time is over, and killed where that does not end it."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err) as process,
    ):
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=ENDING_S / 2)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


@contextmanager
def memory_folder() -> Iterator[Path]:
    """In memory where that is possible: no disk is measured here."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@contextmanager
def attached(
    training: checkflow.Training, **settings: object
) -> Iterator[tuple[Callable[[], None], checkflow.Checkpointer]]:
    """An iteration with its checkpoint, and who makes that. With one slot each would wait until the last is on disk."""
    import checkflow

    with (
        memory_folder() as folder,
        checkflow.attach(
            training.model,
            training.optimizer,
            store=folder / "store",
            slots=2,
            when_full="wait",
            persist_every=checkflow.PersistEvery(iterations=10**9),
            **settings,  # type: ignore[arg-type]
        ) as ckpt,
    ):

        def iterate() -> None:
            training.iteration()
            ckpt.step()

        yield iterate, ckpt


def plain_copy_bytes_per_s(here: Here) -> int:
    """One large copy into pinned memory, by nobody but torch; on a host a copy by one thread."""
    import torch
    from torch.utils.benchmark import Timer

    cuda = here.device == "cuda"
    size_bytes = COPY_BYTES // (8 if here.tiny else 1)
    source = torch.ones(size_bytes, dtype=torch.uint8, device=here.torch_device)
    target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=cuda)
    timer = Timer("target.copy_(source, non_blocking=True)", globals={"target": target, "source": source})
    return round(size_bytes / timer.blocked_autorange(min_run_time=0.5).median)
