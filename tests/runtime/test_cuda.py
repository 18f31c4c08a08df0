"""The CUDA device, where there is one."""

from __future__ import annotations

import ctypes
import time
from functools import partial

import pytest
import torch
from torch import nn
from torn import Case, random_schedule, rig

from checkflow.errors import DeviceError
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.cuda import CudaDevice
from checkflow.runtime.device import Batch, Copy
from checkflow.state.host.losses import Losses
from checkflow.training import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZE = 64 * 2**20


def _device() -> tuple[CudaDevice, Counters]:
    counters = Counters()
    return CudaDevice(counters, torch.device("cuda", torch.cuda.current_device())), counters


def test_an_offload_reads_what_the_compute_stream_wrote_before_it() -> None:
    """And a wait keeps what follows on the compute stream from overtaking it."""
    device, counters = _device()
    memory = (ctypes.c_ubyte * SIZE)()
    device.register(ctypes.addressof(memory), SIZE)
    target = torch.frombuffer(memory, dtype=torch.uint8)
    assert target.is_pinned()
    source = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    for value in range(1, 6):
        source.fill_(value)
        event = device.offload(Batch([Copy(target, source)]))
        device.wait(event, Cause.OPTIMIZER)
        source.fill_(99)
        assert device.synchronize(event)
        assert bool((target == value).all())
    torch.cuda.synchronize()
    device.collect()
    assert counters.offloaded_bytes == 5 * SIZE
    assert counters.link_busy_ns > 0
    assert counters.waits[Cause.OPTIMIZER] == 5
    device.close()


def test_the_host_may_wait_while_the_device_works() -> None:
    """What it waits for is a stall only once the compute stream has nothing to do."""
    device, counters = _device()
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # half a second
    with device.stalling(Cause.SLOT):
        time.sleep(0.1)
    with device.stalling(Cause.DRAIN):
        torch.cuda.synchronize()
        time.sleep(0.1)
    torch.cuda.synchronize()
    device.collect()
    assert counters.stall_ns[Cause.SLOT] < 50_000_000
    assert counters.stall_ns[Cause.DRAIN] > 50_000_000
    device.close()


def test_an_offload_is_waited_for_while_the_device_has_more_to_do() -> None:
    """Half a second of work before it, and as much after it; then none after it, and 1 GiB to copy."""
    device, _ = _device()
    target = torch.zeros(2**30, dtype=torch.uint8).pin_memory()
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
    event = device.offload(Batch([Copy(target[:SIZE], source[:SIZE])]))
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
    assert not device.done(event)
    assert device.done_meanwhile(event)
    torch.cuda.synchronize()
    event = device.offload(Batch([Copy(target, source)]))
    assert not device.done_meanwhile(event)
    device.close()


def test_a_snapshots_memory_returns_without_the_host_waiting() -> None:
    """Released behind its offload, and used again by the compute stream, which would be done long before it."""
    device, _ = _device()
    target, before_it = (torch.zeros(SIZE, dtype=torch.uint8).pin_memory() for _ in range(2))
    source = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    (snapshot,) = device.snapshot([source])
    assert torch.cuda.memory_allocated() >= before + SIZE
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the compute stream is busy: nothing that was given to the device has ended
    device.offload(Batch([Copy(before_it, source)] * 40))  # the link is busy for longer than filling takes
    event = device.offload(Batch([Copy(target, snapshot.data)]))
    device.release(snapshot, event)
    memory = snapshot.data.data_ptr()
    del snapshot
    assert torch.cuda.memory_allocated() == before
    other = torch.empty_like(source).fill_(2)
    assert other.data_ptr() == memory, "the allocator gave other memory: nothing could be torn"
    assert not device.done(event)
    device.synchronize(event)
    assert bool((target == 1).all())
    device.close()


def test_memory_that_cannot_be_pinned_is_an_error_with_advice() -> None:
    """An address that is not mapped."""
    device, _ = _device()
    with pytest.raises(DeviceError, match="refuses to pin 64"):
        device.register(4096, SIZE)
    assert torch.ones(2, device="cuda").sum().item() == 2  # the next kernel does not find the error
    device.close()


def _training(kind: str, device: str = "cuda") -> Case:
    """Batch norm and AdamW, large enough that copies are on their way when the next update comes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for group in optimizer.param_groups:
        group[kind] = True
    x = torch.empty(32, 64, device=device)

    def iterate(number: int) -> None:
        if not torch.cuda.is_current_stream_capturing():
            x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(number)))
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=kind != "capturable")

    return Case(Training(model, optimizer, lambda: None), iterate)


def _tears_nothing(kind: str, replayed: bool = False) -> int:
    """Trains with a checkpoint each iteration, each byte of it as the iteration left it. How many were staged."""
    factory = partial(_training, kind)
    made = rig(factory, random_schedule(factory, 0), device=lambda counters: CudaDevice(counters, torch.device("cuda")))
    iterate = made.case.iterate
    made.run(3)
    if replayed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            iterate(0)
        made.case.iterate = lambda _number: graph.replay()
        made.mark()  # what was captured has not run
    made.run(8)
    made.close()
    assert made.torn() == []
    return len(made.sink.staged)


@pytest.mark.parametrize("kind", ["foreach", "fused", "capturable"])
def test_training_on_cuda_tears_nothing(kind: str) -> None:
    """Real streams, and places drawn without regard for any deadline."""
    assert _tears_nothing(kind) == 11


def test_training_on_a_stream_of_its_own_tears_nothing() -> None:
    """The compute stream is whichever is current."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        assert _tears_nothing("foreach") == 11


def test_replays_of_a_cuda_graph_tear_nothing() -> None:
    """They write without hooks: what was not read when recording began is given up, replays are waited for."""
    assert _tears_nothing("capturable", replayed=True) >= 8


def test_a_loss_on_a_device_is_not_waited_for() -> None:
    """It is known once the device has come to it. The first one's memory is pinned, which the device is waited for."""
    losses, loss = Losses(), torch.tensor(2.0, device="cuda")
    losses.add(loss)
    torch.cuda.synchronize()
    assert list(losses.known) == [2.0]
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # half a second
    losses.add(loss)
    before = losses.known
    torch.cuda.synchronize()
    assert [len(before), len(losses.known)] == [1, 2]
