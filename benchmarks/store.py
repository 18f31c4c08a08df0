"""Persist and restore against the disk's own speed and against torch.save, safetensors and DCP, side by side.

    python benchmarks/store.py --size 1GiB --rounds 5 --directory .

Each round does every contender once, in another order, on the same disk; figures are medians over rounds, ratios are to
raw direct writes or reads of the same bytes in the same run; processor time is that of all threads, the saver's
included, without what the kernel does for a disk elsewhere. Reading back is in none of them. "durable" means synced to
the device: what does not sync by itself is synced here, its time included. Cold reads start with nothing of the files
in the page cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from checkflow.store.format.blocks import THREADS, buffer_of
from checkflow.store.format.disk import WRITE_BYTES
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.manifest import BLOCK_BYTES
from checkflow.store.format.reader import load_newest
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.units import format_bytes, parse_bytes

State = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Contender:
    """`before` and `after` are not timed."""

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Took:
    wall_s: float
    processor_s: float


def layout_of(size_bytes: int) -> Layout:
    """A model and two moments for each parameter, in 24 layers."""
    width = size_bytes // 3 // 24 // 4 // 1024
    weights = [TensorSpec(f"layers.{layer}.weight", "F32", (width, 1024)) for layer in range(24)]
    moments = [
        TensorSpec(f"{weight.name}.{slot}", "F32", weight.shape)
        for weight in weights
        for slot in ("exp_avg", "exp_avg_sq")
    ]
    return Layout.of((FileSpec("model.safetensors", tuple(weights)), FileSpec("optimizer.safetensors", tuple(moments))))


def state_of(layout: Layout, slot: memoryview) -> State:
    """The slot's tensors, as torch sees them."""
    return {
        file.name.removesuffix(".safetensors"): {
            tensor.spec.name: torch.frombuffer(
                slot, dtype=torch.float32, offset=tensor.offset_bytes, count=tensor.spec.size_bytes // 4
            ).reshape(tensor.spec.shape)
            for tensor in file.tensors
        }
        for file in layout.files
    }


def raw_write(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    for start in range(0, len(data), WRITE_BYTES):
        os.pwrite(fd, data[start : start + WRITE_BYTES], start)
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(thread: int) -> None:
        for start in range(thread * BLOCK_BYTES, len(data), THREADS * BLOCK_BYTES):
            os.preadv(fd, [data[start : start + BLOCK_BYTES]], start)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, range(THREADS)))
    os.close(fd)


def sync(folder: Path) -> None:
    for path in (*(path for path in folder.rglob("*") if path.is_file()), folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def save_torch(state: State, folder: Path) -> None:
    torch.save(state, folder / "state.pt")
    sync(folder)


def save_safetensors(state: State, folder: Path) -> None:
    for name, tensors in state.items():
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")
    sync(folder)


def save_dcp(state: State, folder: Path) -> None:
    dcp_save({name: dict(tensors) for name, tensors in state.items()}, checkpoint_id=folder, no_dist=True)
    sync(folder)


def read_safetensors(folder: Path) -> None:
    for path in folder.iterdir():
        for tensor in safetensors.torch.load_file(path).values():
            tensor.clone()  # the file is only mapped until somebody reads it


def read_dcp(state: State, folder: Path) -> None:
    dcp_load({name: dict(tensors) for name, tensors in state.items()}, checkpoint_id=folder, no_dist=True)


@dataclass
class Persisted:
    """A handle whose slots hold the state already, staged again and again."""

    handle: StoreHandle
    times: int = 0

    def stage(self) -> None:
        slot = self.handle.acquire()
        assert slot is not None
        self.times += 1
        self.handle.stage(slot, self.times, b"{}")

    def persist(self) -> None:
        """From staged to durable, through the saver process."""
        self.handle.persist_now()
        if not self.handle.drain(600):
            raise SystemExit("the store reported an error")

    def settle(self) -> None:
        """Until the saver has read it back and removed the one before, which nothing else is to be timed beside."""
        while self.handle.status().verified < self.times:
            self.handle.poll()
            time.sleep(0.01)


def processor_s(saver: int | None) -> float:
    """Of this process and a saver."""
    used_s = time.process_time()
    if saver is not None:
        fields = Path(f"/proc/{saver}/stat").read_text().rpartition(")")[2].split()
        used_s += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used_s


def measure(contenders: list[Contender], rounds: int, saver: int | None = None) -> dict[str, list[Took]]:
    """What each contender took in each round, in a random order within a round."""
    times: dict[str, list[Took]] = {contender.name: [] for contender in contenders}
    choose = random.Random(0)
    for _ in range(rounds):
        for contender in choose.sample(contenders, len(contenders)):
            contender.before()
            used_s, started = processor_s(saver), time.perf_counter()
            contender.run()
            took_s = time.perf_counter() - started
            times[contender.name].append(Took(took_s, processor_s(saver) - used_s))
            contender.after()
    return times


def table(title: str, times: dict[str, list[Took]], size_bytes: int, reference: str) -> Table:
    rows = Table(title, "GB/s", "of raw", "slowest GB/s", "fastest GB/s", "processor s / GB", box=None, pad_edge=False)
    medians = {name: statistics.median(took.wall_s for took in all_took) for name, all_took in times.items()}
    for name, all_took in sorted(times.items(), key=lambda item: medians[item[0]]):
        seconds = [took.wall_s for took in all_took]
        rates = [size_bytes / second / 1e9 for second in (medians[name], max(seconds), min(seconds))]
        used_s = statistics.median(took.processor_s for took in all_took) / (size_bytes / 1e9)
        rows.add_row(
            name,
            f"{rates[0]:.2f}",
            f"{medians[reference] / medians[name]:.2f}",
            f"{rates[1]:.2f}",
            f"{rates[2]:.2f}",
            f"{used_s:.3f}",
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path())
    options = parser.parse_args()
    layout = layout_of(parse_bytes(options.size, "--size"))
    console = Console(width=110)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="store-benchmark-") as name:
        folder = Path(name)
        handle = StoreHandle.open(
            folder / "checkflow",
            [layout],
            slots=2,
            persist_every=PersistEvery(iterations=10**9),
            retention=Retention(1),
        )
        with handle:
            persisted = run_persist(handle, layout, folder, options.rounds)
        restored = run_restore(layout, folder, options.rounds)
    size = layout.size_bytes
    console.print(f"{format_bytes(size)} of state, {options.rounds} rounds, {os.cpu_count()} cores, medians\n")
    console.print(table("persist: host memory to durable", persisted, size, "raw direct write"))
    console.print()
    console.print(table("restore: disk to host memory", restored, size, "raw direct read, cold"))


def run_persist(handle: StoreHandle, layout: Layout, folder: Path, rounds: int) -> dict[str, list[Took]]:
    first = handle.acquire()
    assert first is not None
    noise = np.random.default_rng(0)
    for file in layout.files:
        for tensor in file.tensors:
            view = np.frombuffer(first.view(file.name, tensor.spec.name), np.float32)
            view[:] = noise.standard_normal(len(view), np.float32)
    second = handle.acquire()
    assert second is not None
    second.data[:] = first.data  # from here on they are only staged again
    handle.abandon(first)
    handle.abandon(second)
    data = buffer_of(layout.size_bytes)
    small = memoryview(mmap.mmap(-1, layout.size_bytes))  # shared, as the kernel gives it to who does not ask
    data[: layout.size_bytes] = small[:] = first.data
    state = state_of(layout, data)
    persisted = Persisted(handle)
    contenders = [
        Contender(
            f"raw direct write{source}",
            partial(raw_write, folder / "raw", memory),
            lambda: (folder / "raw").unlink(missing_ok=True),  # freeing the last one is not timed
        )
        for source, memory in (
            ("", data),
            (", from a slot", first.data),
            (", from shared memory in small pages", small),
        )
    ]
    contenders += [
        Contender("checkflow", persisted.persist, persisted.stage, persisted.settle),
        Contender("torch.save", lambda: save_torch(state, folder / "torch"), lambda: fresh(folder / "torch")),
        Contender(
            "safetensors",
            lambda: save_safetensors(state, folder / "safetensors"),
            lambda: fresh(folder / "safetensors"),
        ),
        Contender("DCP", lambda: save_dcp(state, folder / "dcp"), lambda: fresh(folder / "dcp")),
    ]
    measure(contenders, 1)  # page tables, imports, the file system's allocation
    return measure(contenders, rounds, handle.saver_pid)


def run_restore(layout: Layout, folder: Path, rounds: int) -> dict[str, list[Took]]:
    buffer = buffer_of(layout.size_bytes)
    state = state_of(layout, buffer)
    readers: list[tuple[str, Path, Callable[[], object]]] = [
        ("raw direct read", folder / "raw", lambda: raw_read(folder / "raw", buffer)),
        ("checkflow, verified", folder / "checkflow", lambda: load_newest(folder / "checkflow", buffer=buffer)),
        ("checkflow, verified, new memory", folder / "checkflow", lambda: load_newest(folder / "checkflow")),
        ("torch.load", folder / "torch", lambda: torch.load(folder / "torch" / "state.pt", weights_only=True)),
        ("safetensors", folder / "safetensors", lambda: read_safetensors(folder / "safetensors")),
        ("DCP", folder / "dcp", lambda: read_dcp(state, folder / "dcp")),
    ]
    contenders = [Contender(f"{name}, cold", run, partial(forget, where)) for name, where, run in readers]
    contenders += [Contender(f"{name}, warm", run, run) for name, _, run in readers]
    measure(contenders, 1)
    return measure(contenders, rounds)


if __name__ == "__main__":
    main()
