"""CheckFreq (Mohan, Phanishayee, Chidambaram, FAST 2021), written from its sections 4.3 and 4.4.

snapshot(): after the update, a copy of the whole state, beside the next iteration's forward and backward; a semaphore
holds the next update until it is made. persist(): torch.save and fsync to a new file by a background process. At most
one checkpoint is on its way: the next waits until it is durable. On CUDA the snapshot is made in GPU memory where that
has room for it, else in host memory. The interval is given here, so the tuning of its frequency is left out.

checkflow_checkfreq has checkflow's runtime and store carry out the same scheme. This one shares nothing with them.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.utils import _pytree

import checkflow
from contenders import Contender, Job, Tier
from contenders._state import first_that_loads, newest_first, place, prune, put_back, state_of, sync


def persist(orders: Connection, staged: dict[str, object]) -> None:
    """The background process: write what the shared memory holds whenever an order (path, iteration, durable) comes."""
    try:
        while True:
            path, rest, durable = orders.recv()
            try:
                leaves, structure = _pytree.tree_flatten(staged)
                for index, value in rest.items():
                    leaves[index] = value
                written = path.with_suffix(".tmp")
                torch.save(_pytree.tree_unflatten(leaves, structure), written)
                if durable:
                    sync(written)
                written.rename(path)
                if durable:
                    sync(path.parent)
                prune(path.parent)
                orders.send(None)
            except OSError as error:
                orders.send(error)
            except RuntimeError as error:  # torch.save's own writer
                orders.send(OSError(str(error)))
    except EOFError:
        return


class CheckFreq(Contender):
    what = "two phases: snapshot beside the next forward and backward, torch.save and fsync in a process"
    durable = True

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        super().__init__(job, training)
        self._snapshot_made = threading.Event()
        self._snapshot_made.set()
        self._staged: list[object] | None = None
        self._pinned: list[int] = []  # addresses of its memory that CUDA knows of
        self._failure: BaseException | None = None
        self._persisting = False
        self._copier: threading.Thread | None = None

    @classmethod
    def version(cls) -> str:
        return f"after its paper, on {super().version()}"

    def before_update(self) -> None:
        self._snapshot_made.wait()

    def after_iteration(self, iteration: int) -> None:
        if not self.job.due(iteration):
            return
        self.wait()
        leaves, structure = _pytree.tree_flatten(state_of(self.training, iteration))
        if self._staged is None:
            self._start(leaves, structure)
        self._snapshot_made.clear()  # set again at once where the snapshot is made in GPU memory
        source, ready = self._on_device(leaves)
        self._persisting = True
        self._copier = threading.Thread(target=self._copy, args=(source, ready, place(self.job.folder, iteration)))
        self._copier.start()

    def wait(self) -> None:
        if self._copier is not None:
            self._copier.join()
            self._copier = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._persisting:
            self._persisting = False
            answer = self._orders.recv()
            if answer is not None:
                raise answer

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._staged is not None:
                self._orders.close()
                self._process.join()
                for address in self._pinned:
                    _pinning("Unregister", address)

    def restore(self) -> int:
        return first_that_loads(newest_first(self.job.folder), self._load)

    def _load(self, path: Path) -> int:
        return put_back(self.training, torch.load(path, weights_only=True))

    def _start(self, leaves: list[object], structure: _pytree.TreeSpec) -> None:
        """Allocate the snapshot in host memory, once, and start the process that shares it."""
        self._staged = [_shared(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for staged in self._staged:
            if isinstance(staged, torch.Tensor) and torch.cuda.is_available() and staged.numel():
                _pinning("Register", staged.data_ptr(), staged.numel() * staged.element_size(), 0)
                self._pinned.append(staged.data_ptr())
        context = mp.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(
            target=persist, args=(theirs, _pytree.tree_unflatten(self._staged, structure)), daemon=True
        )
        self._process.start()
        theirs.close()

    def _on_device(self, leaves: list[object]) -> tuple[list[object], torch.cuda.Event | None]:
        """The GPU snapshot where there is room for it; else the live tensors. And when they are written."""
        if not torch.cuda.is_available():
            return leaves, None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if torch.cuda.mem_get_info()[0] > needed:
            leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf for leaf in leaves]
            self._snapshot_made.set()
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return leaves, ready

    def _copy(self, source: list[object], ready: torch.cuda.Event | None, path: Path) -> None:
        try:
            assert self._staged is not None
            rest = {}
            stream = None if ready is None else torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.no_grad(), torch.cuda.stream(stream):
                if ready is not None and stream is not None:
                    stream.wait_event(ready)
                for index, (target, leaf) in enumerate(zip(self._staged, source, strict=True)):
                    if isinstance(target, torch.Tensor) and isinstance(leaf, torch.Tensor):
                        target.copy_(leaf, non_blocking=True)
                    else:
                        rest[index] = leaf
            if stream is not None:
                stream.synchronize()
            self._snapshot_made.set()
            self._orders.send((path, rest, self.job.tier is Tier.DISK))
        except BaseException as error:  # noqa: BLE001 (raised in the training thread)
            self._failure = error
            self._persisting = False
        finally:
            self._snapshot_made.set()


def _shared(like: torch.Tensor) -> torch.Tensor:
    """Host memory that the background process sees too."""
    made = torch.empty_like(like, device="cpu")
    made.share_memory_()  # type: ignore[no-untyped-call]
    return made


def _pinning(what: str, *arguments: int) -> None:
    """Pin memory where it is, or undo that: the next job's may lie at the same address."""
    error = getattr(torch.cuda.cudart(), f"cudaHost{what}")(*arguments)  # type: ignore[no-untyped-call]
    assert int(error) == 0, f"cudaHost{what}: error {error}"
