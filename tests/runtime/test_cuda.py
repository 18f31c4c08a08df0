"""The CUDA device, where there is one."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn
from torn import Case, MemorySink, random_schedule, state_bytes

from checkflow.errors import DeviceError
from checkflow.runtime.binding import bind
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.cuda import CudaDevice
from checkflow.runtime.device import Batch, Copy
from checkflow.runtime.executor import Executor
from checkflow.runtime.hook import place
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


def test_a_snapshots_memory_returns_without_the_host_waiting() -> None:
    """Released behind its offload, and used again by the compute stream."""
    device, _ = _device()
    target = torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
    source = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    (snapshot,) = device.snapshot([source])
    assert torch.cuda.memory_allocated() >= before + SIZE
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the compute stream is busy: nothing that was given to the device has ended
    event = device.offload(Batch([Copy(target, snapshot.data)]))
    device.release(snapshot, event)
    del snapshot
    assert torch.cuda.memory_allocated() == before
    torch.empty_like(source).fill_(2)  # takes the memory that the snapshot had
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


@pytest.mark.parametrize("kind", ["foreach", "fused", "capturable"])
def test_training_on_cuda_tears_nothing(kind: str) -> None:
    """Real streams; offloads large enough to be in flight when the next update comes."""

    def factory(device: str = "cpu") -> Case:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 512)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for group in optimizer.param_groups:
            group[kind] = device == "cuda"

        def iterate(number: int) -> None:
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to(device)
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return Case(Training(model, optimizer, lambda: None), iterate)

    def on_cuda() -> Case:
        return factory("cuda")

    schedule = random_schedule(on_cuda, 0)
    case = on_cuda()
    device, counters = _device()
    binding = bind(schedule, case.training)
    sink = MemorySink(binding)
    executor = Executor(
        schedule, case.training, binding, device, sink, lambda _: lambda: b"{}", counters, interval=1, block=True
    )
    handles = place(executor, case.training)
    expected = {}
    for number in range(10):
        case.iterate(number)
        expected[number + 1] = state_bytes(case.training)
        executor.step()
    executor.close()
    for handle in handles:
        handle.remove()
    assert sink.order == list(range(1, 11))
    for iteration, staged in sink.staged.items():
        assert all(data == expected[iteration][name] for name, data in staged.items())
