"""What the CUDA device keeps, told by counting references. Streams and events are stand-ins: it needs no GPU."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from checkflow.runtime import cudart
from checkflow.runtime.counters import Counters
from checkflow.runtime.cuda import CudaDevice
from checkflow.runtime.device import Batch, Copy


class Stream:
    """Does nothing until it is told to end."""

    def __init__(self, *_args: object) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: object) -> None:
        self.waited.append(stream)

    def synchronize(self) -> None: ...


class Event:
    """Never over."""

    def __init__(self, **_options: object) -> None: ...

    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return False


def test_a_released_snapshots_memory_is_nobodys_while_its_offload_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that made it waits for the offload; then no reference is left, though the offload has not ended."""
    compute = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(cudart, "has_batches", lambda: False, raising=False)
    device = CudaDevice(Counters(), torch.device("cuda", 0))
    source, slot = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    (snapshot,) = device.snapshot([source])
    memory = weakref.ref(snapshot.data)
    event = device.offload(Batch([Copy(slot, snapshot.data)]))
    device.release(snapshot, event)
    del snapshot
    assert not device.done(event)
    assert event.end in compute.waited
    assert memory() is None
    assert bool((slot == 1).all())
