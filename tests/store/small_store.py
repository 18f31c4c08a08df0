"""Small checkpoints whose every byte tells the iteration, written by real savers or in this process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkflow.lanes import lane_file
from checkflow.store.both.config import SaverConfig
from checkflow.store.both.messages import Message
from checkflow.store.format.disk import Disk, LocalDisk
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.reader import Checkpoint, Loaded, load, load_newest
from checkflow.store.format.retention import Retention
from checkflow.store.memory.saver_slots import Taken, take_due
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.memory.trainer_slots import Slots
from checkflow.store.saver.persister import Persister
from checkflow.store.trainer.handle import StoreHandle

SMALL = Layout.of(
    (
        FileSpec("model.safetensors", (TensorSpec("w", "F32", (300, 7)), TensorSpec("b", "BF16", (5,))), (("v", "w"),)),
        FileSpec("optimizer.safetensors", (TensorSpec("w.exp_avg", "F32", (300, 7)), TensorSpec("w.step", "I64", ()))),
    )
)
DIRECT = Layout.of(
    (
        FileSpec("model.safetensors", (TensorSpec("w", "F32", (300, 1001)),)),  # large enough to be written directly
        FileSpec("optimizer.safetensors", (TensorSpec("w.step", "I64", ()),)),
    )
)
TINY = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (700,)),)),))


def fill(data: memoryview, layout: Layout, iteration: int) -> None:
    """Give every tensor's byte the iteration's value."""
    for file in layout.files:
        for tensor in file.tensors:
            data[tensor.offset_bytes : tensor.end_bytes] = bytes([iteration % 251]) * tensor.spec.size_bytes


def record_of(iteration: int) -> bytes:
    return json.dumps({"iteration": iteration}).encode()


def is_whole(loaded: Loaded, layout: Layout = SMALL) -> bool:
    """Whether every byte is of the iteration that the checkpoint says it is."""
    iteration = loaded.checkpoint.iteration
    if loaded.record != record_of(iteration) or set(loaded.files) != {file.name for file in layout.files}:
        return False
    for file in layout.files:
        body = bytes(loaded.files[file.name])
        tensors = body[len(file.header) :]
        if body[: len(file.header)] != file.header or tensors != bytes([iteration % 251]) * len(tensors):
            return False
    return True


def stage(handle: StoreHandle, layout: Layout, iteration: int) -> bool:
    """Fill and stage an iteration; False where no slot was free."""
    slot = handle.acquire()
    if slot is None:
        return False
    fill(slot.data, layout, iteration)
    handle.stage(slot, iteration, record_of(iteration))
    return True


def newest_whole(store: Path, layout: Layout = SMALL) -> int:
    """The restored iteration, its bytes checked; 0 for an empty store."""
    loaded = load_newest(store).loaded
    assert loaded is None or is_whole(loaded, layout)
    return 0 if loaded is None else loaded.checkpoint.iteration


def newest_in_lanes(store: Path, lanes: int, layout: Layout = SMALL) -> int:
    """The same where each lane has the bytes of its own last iteration; the first one is of every lane."""
    loaded = load_newest(store).loaded
    if loaded is None:
        return 0
    iteration = loaded.checkpoint.iteration
    assert loaded.record == record_of(iteration)
    assert set(loaded.files) == {lane_file(lane, file.name) for lane in range(lanes) for file in layout.files}
    for lane in range(lanes):
        own = max(1, iteration - (iteration - lane) % lanes)
        for file in layout.files:
            body = bytes(loaded.files[lane_file(lane, file.name)])[len(file.header) :]
            assert body == bytes([own % 251]) * len(body), f"lane {lane} of iteration {iteration}"
    return iteration


def load_again(checkpoint: Checkpoint, layout: Layout = SMALL) -> bool:
    return is_whole(load(checkpoint), layout)


def silent(_: str) -> None:
    """A notify that nobody reads."""


@dataclass
class InProcess:
    """A trainer's slots and a saver's persister in one process, on any Disk."""

    store: Path
    layout: Layout = SMALL
    disk: Disk = field(default_factory=LocalDisk)
    retention: Retention = field(default_factory=Retention)
    on_report: Callable[[Message], None] = lambda _: None
    retry_s: float = 0.0  # what fails is an error at once
    grouped: bool = False  # other ranks have other parts
    lanes: int = 1  # of more, iterations are staged one after the other, from 1 on

    def __post_init__(self) -> None:
        self.store.mkdir(exist_ok=True)
        self.reports: list[Message] = []
        config = SaverConfig(
            self.store,
            (self.layout.specs,) * self.lanes,
            self.retention,
            {},
            newest_wins=not self.grouped,
            retry_s=self.retry_s,
            grouped=self.grouped,
        )
        layouts = [self.layout] * self.lanes
        self.shared = SharedMemory.create(layouts, slots=3 * self.lanes, record_room_bytes=100, config=config.dump())
        self.slots = Slots(self.shared, layouts, "skip", grouped=self.grouped)
        self.persister = Persister(self.shared, config, self.disk, self._report, self.store)

    def _report(self, message: Message) -> None:
        self.reports.append(message)
        self.on_report(message)

    def persist(self, *iterations: int, keep: bool = False) -> None:
        """Stage iterations, make each durable, and settle them together."""
        written = [self.persister.write(self.take(iteration, keep=keep)) for iteration in iterations]
        self.persister.settle([each for each in written if each is not None])

    def stage(self, iteration: int) -> None:
        """Fill and stage an iteration that is due: its lane, and of the first one every lane."""
        for lane in range(iteration + 1 if iteration == 1 else iteration + self.lanes, iteration + self.lanes + 1):
            slot = self.slots.try_acquire(lane % self.lanes)
            assert slot is not None
            fill(slot.data, self.layout, iteration)
            last = lane == iteration + self.lanes
            self.slots.stage(slot, iteration, record_of(iteration), due=last, whole=last)

    def take(self, iteration: int, *, keep: bool = False) -> Taken:
        """Stage an iteration and take it, as the saver does."""
        self.stage(iteration)
        if keep:
            self.slots.ask(keep=True)
        taken = take_due(self.shared)
        assert taken is not None
        return taken

    def close(self) -> None:
        self.shared.close()


def trainer_command(script: str, *arguments: object) -> list[str]:
    """A Python process of this environment that finds the package and these helpers."""
    paths = [str(folder) for folder in Path(__file__).parents[:3]]
    return [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{script}", *map(str, arguments)]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for another process. Generous: it fails only where it would hang."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def saver_of(handle: StoreHandle) -> int:
    assert handle.saver_pid is not None
    return handle.saver_pid


def until_verified(handle: StoreHandle, count: int) -> None:
    """Until the saver has nothing more to do."""

    def verified() -> bool:
        handle.poll()
        return handle.status().verified == count

    until(verified, "it is verified")


def until_idle(handle: StoreHandle, iteration: int) -> None:
    """Until the checkpoint of this iteration, the newest that is due, is verified, and so all before it settled."""

    def verified() -> bool:
        handle.poll()
        return handle.status().verified_iteration == iteration

    until(verified, f"iteration {iteration} is verified")


def stop(handle: StoreHandle) -> int:
    """Stop the saver, but not within the few instructions in which it excludes the trainer; its pid."""
    saver = saver_of(handle)
    while True:
        os.kill(saver, signal.SIGSTOP)
        with handle.shared.locked(timeout_s=0.1) as held:
            if held:
                return saver
        os.kill(saver, signal.SIGCONT)


@contextmanager
def stopped(handle: StoreHandle) -> Iterator[None]:
    """The saver does nothing here."""
    saver = stop(handle)
    try:
        yield
    finally:
        os.kill(saver, signal.SIGCONT)
