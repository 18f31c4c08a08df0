"""A checkpoint at every iteration of a training in several processes, beside torch's own ways, in turns.

    python benchmarks/distributed.py                      # two ranks over gloo, DDP and FSDP2
    python benchmarks/distributed.py --ranks 4 --rounds 5 -o distributed.json

Each turn is some iterations under one contender, in the same processes, with turns without checkpoints in between, and
all ranks take the same turns. An iteration's time is the slowest rank's; figures are medians. What is shown:

    loss       by how much longer an iteration takes than in the turns without checkpoints before and after it
    blocked    how long the training's thread is in the contender's calls, an iteration
    durable    from the last iteration's end until its checkpoint is on the disk of every rank
    restore    a new model and optimizer of the same layout, until they have the state
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkflow

KINDS = ("ddp", "fsdp")
WIDTH, LAYERS, ROWS = 768, 6, 192


class Training:
    """Some 14 million parameters with AdamW: 170 MB of state in all."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH // 2), torch.nn.GELU()) for _ in range(LAYERS)]
        blocks = [torch.nn.Sequential(layer, torch.nn.Linear(4 * WIDTH // 2, WIDTH)) for layer in layers]
        model = torch.nn.Sequential(*blocks)
        if kind == "fsdp":
            for block in model:
                fully_shard(block)
            fully_shard(model)
        self.model: torch.nn.Module = DistributedDataParallel(model) if kind == "ddp" else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def iterate(self, before_update: Callable[[], None] = lambda: None) -> float:
        """How long that was waited for."""
        self.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        began = time.perf_counter()
        before_update()
        waited = time.perf_counter() - began
        self.optimizer.step()
        self.optimizer.zero_grad()
        return waited

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class Contender:
    """One way to have a checkpoint after each iteration. This one has none."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder

    def begin(self) -> None:
        """The turn begins."""

    def after(self, iteration: int) -> None:
        """An iteration has ended."""

    def before_update(self) -> None:
        """The next update is about to be made."""

    def durable(self) -> None:
        """Return when the last one is on disk, and let the training go."""

    def restore(self, into: Training) -> None:
        """Of what is durable."""

    def leave(self) -> None:
        """Let go what was restored."""


class Checkflow(Contender):
    options: ClassVar[dict[str, Any]] = {}

    def begin(self) -> None:
        self._ckpt = self._attach(self.training)

    def _attach(self, training: Training) -> checkflow.Checkpointer:
        return checkflow.attach(
            training.model,
            training.optimizer,
            store=self.folder,
            tell=lambda _: None,
            **self.options,
        )

    def after(self, _iteration: int) -> None:
        self._ckpt.step()

    def durable(self) -> None:
        self._ckpt.close()

    def restore(self, into: Training) -> None:
        self._ckpt = self._attach(into)
        self._ckpt.restore()

    def leave(self) -> None:
        self._ckpt.close()


class EachOnDisk(Checkflow):
    options: ClassVar[dict[str, Any]] = {
        "persist_every": checkflow.PersistEvery(iterations=1),
        "when_full": "wait",
    }


class Mirrored(Checkflow):
    """Each checkpoint in the memory of another rank's machine, which here is the same one."""

    options: ClassVar[dict[str, Any]] = {"replicate": 1, "when_full": "wait", "notify": lambda _: None}


class DCP(Contender):
    def after(self, iteration: int) -> None:
        self._path = self.folder / str(iteration)
        save(self.training.state(), storage_writer=FileSystemWriter(self._path))
        self._prune(iteration)

    def _prune(self, iteration: int) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / str(iteration - 2), ignore_errors=True)

    def restore(self, into: Training) -> None:
        state = into.state()
        load(state, storage_reader=FileSystemReader(self._path))
        set_state_dict(
            into.model,
            into.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class DCPAsync(DCP):
    """Staged beside the next forward and backward pass into buffers that are kept, as its documentation says."""

    kind = AsyncCheckpointerType.THREAD

    def begin(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.kind is AsyncCheckpointerType.PROCESS,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self._found: AsyncSaveResponse | None = None

    def before_update(self) -> None:
        if self._found is not None:
            self._found.staging_completion.result()

    def after(self, iteration: int) -> None:
        self._wait()
        self._path = self.folder / str(iteration)
        found = async_save(
            self.training.state(),
            storage_writer=FileSystemWriter(self._path),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            process_group=self._group,
        )
        assert isinstance(found, AsyncSaveResponse)
        self._found = found
        self._prune(iteration)

    def _wait(self) -> None:
        if self._found is not None:
            self.before_update()
            self._found.upload_completion.result()
            self._found = None

    def durable(self) -> None:
        self._wait()
        self._stager.close()


class DCPProcess(DCPAsync):
    kind = AsyncCheckpointerType.PROCESS


CONTENDERS: dict[str, type[Contender]] = {
    "checkflow": Checkflow,
    "checkflow, each on disk": EachOnDisk,
    "checkflow, each mirrored": Mirrored,
    "DCP async, thread": DCPAsync,
    "DCP async, process": DCPProcess,
    "DCP": DCP,
}


def slowest(value: float) -> float:
    """Of all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def turn(training: Training, contender: Contender, iterations: int) -> dict[str, float]:
    """Seconds."""
    contender.begin()
    times, blocked = [], []
    for iteration in range(iterations):
        dist.barrier()
        began = time.perf_counter()
        waited = training.iterate(contender.before_update)
        called = time.perf_counter()
        contender.after(iteration)
        ended = time.perf_counter()
        times.append(slowest(ended - began))
        blocked.append(slowest(waited + ended - called))
    dist.barrier()
    began = time.perf_counter()
    contender.durable()
    durable = slowest(time.perf_counter() - began)
    return {
        "iteration": statistics.median(times[1:]),  # the first one makes buffers
        "blocked": statistics.median(blocked[1:]),
        "durable": durable,
    }


def measure(kind: str, folder: Path, rounds: int, iterations: int, tell: Callable[[str], None]) -> dict[str, object]:
    training = Training(kind)
    for _ in range(2):
        training.iterate()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in CONTENDERS}
    alone = [turn(training, Contender(training, folder), iterations)["iteration"]]
    for number in range(rounds):
        for name, make in CONTENDERS.items():
            tell(f"{kind}: round {number + 1} of {rounds}, {name}")
            place = folder / f"{kind}-{number}-{name.replace(' ', '-')}"
            contender = make(training, place)
            figures = turn(training, contender, iterations)
            alone.append(turn(training, Contender(training, folder), iterations)["iteration"])
            figures["loss"] = figures["iteration"] / statistics.mean(alone[-2:]) - 1
            again = Training(kind)
            dist.barrier()
            began = time.perf_counter()
            contender.restore(again)
            figures["restore"] = slowest(time.perf_counter() - began)
            contender.leave()
            for key, value in figures.items():
                found[name].setdefault(key, []).append(value)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
    medians = {name: {key: statistics.median(values) for key, values in each.items()} for name, each in found.items()}
    return {"alone_s": statistics.median(alone), "contenders": medians}


def shown(kind: str, figures: dict[str, object]) -> Table:
    alone, contenders = figures["alone_s"], figures["contenders"]
    assert isinstance(alone, float)
    assert isinstance(contenders, dict)
    table = Table(title=f"{kind}: an iteration takes {1000 * alone:.0f} ms without checkpoints", box=None)
    for column in ("", "loss", "blocked", "durable", "restore"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in contenders.items():
        cells = (
            f"{100 * each['loss']:.0f}%",
            *(f"{1000 * each[key]:.0f} ms" for key in ("blocked", "durable", "restore")),
        )
        table.add_row(name, *cells)
    return table


def rank(given: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(stderr=True)
    tell = console.print if dist.get_rank() == 0 else (lambda _: None)
    report = {kind: measure(kind, given.directory, given.rounds, given.iterations, tell) for kind in KINDS}
    if dist.get_rank() == 0:
        for kind, figures in report.items():
            Console().print(shown(kind, figures))
        if given.output is not None:
            given.output.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": str(given.ranks),
        }
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--directory", folder]
        environment = os.environ | meeting | {"OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(given.ranks)]
        codes = [process.wait() for process in ranks]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
