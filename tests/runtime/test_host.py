"""The host device: one thread that copies, in order, while training runs on."""

from __future__ import annotations

import threading
import time

import pytest
import small_trainings as trainings
import torch
from torn import Factory, random_schedule, rig

from checkflow.errors import DeviceError
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, Copy
from checkflow.runtime.host import HostDevice


class Threaded(HostDevice):
    """Leaves every copy to the thread."""

    inline_bytes = -1


class SlowDevice(Threaded):
    """Copies in two halves with a pause between, so that a write in the middle shows."""

    pause_s = 0.0003

    def _copy(self, batch: Batch) -> None:
        for copy in batch:
            half = copy.source.numel() // 2
            super()._copy(Batch([Copy(copy.destination[:half], copy.source[:half])]))
            time.sleep(self.pause_s)
            super()._copy(Batch([Copy(copy.destination[half:], copy.source[half:])]))


@pytest.mark.parametrize("factory", trainings.ALL, ids=lambda factory: factory.__name__)
def test_slow_copies_overlap_training_and_tear_nothing(factory: Factory) -> None:
    """The real thread, made slower than the training."""
    made = rig(factory, random_schedule(factory, 5), device=SlowDevice)
    made.run(5)
    made.close()
    assert made.torn() == []
    assert made.sink.order == [1, 2, 3, 4, 5]


def _tensor(value: int, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_storage_that_moved_is_read_where_it_is() -> None:
    """share_memory_() and sending a tensor to another process move it; a batch serves many checkpoints."""
    device = HostDevice(Counters())
    source, target = _tensor(1, 100_000), _tensor(0, 100_000)
    batch = Batch([Copy(target, source)])
    assert device.synchronize(device.offload(batch))
    source.share_memory_()  # type: ignore[no-untyped-call]
    source.fill_(7)
    assert device.synchronize(device.offload(batch))
    assert bool((target == 7).all())
    device.close()


def test_offloads_end_in_order_and_waiting_is_counted() -> None:
    """A later event implies the earlier ones."""
    counters = Counters()
    device = SlowDevice(counters)
    device.pause_s = 0.02  # so that it has not ended before it is waited for
    targets = [_tensor(0) for _ in range(10)]
    events = [device.offload(Batch([Copy(target, _tensor(number))])) for number, target in enumerate(targets)]
    assert [event.order for event in events] == sorted({event.order for event in events})
    device.wait(events[6], Cause.OPTIMIZER)
    assert all(device.done(event) for event in events[:7])
    assert all(torch.equal(target, _tensor(number)) for number, target in enumerate(targets[:7]))
    assert counters.stall_ns[Cause.OPTIMIZER] > 0
    assert device.synchronize(events[-1])
    assert counters.offloaded_bytes == 10_000
    assert counters.link_busy_ns > 0
    device.close()


def test_an_error_of_the_thread_surfaces_in_the_training_loop() -> None:
    """Not swallowed, and nothing waits for ever."""

    class Failing(Threaded):
        def _copy(self, _batch: Batch, /) -> None:
            raise OSError("no such page")

    device = Failing(Counters())
    event = device.offload(Batch([Copy(_tensor(0), _tensor(1))]))
    with pytest.raises(DeviceError, match="no such page"):
        device.wait(event, Cause.OPTIMIZER)
    with pytest.raises(DeviceError, match="no such page"):
        device.check()
    device.close()
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0), device=Failing)
    with pytest.raises(DeviceError, match="no such page"):
        made.run(3)
    made.close()
    assert made.sink.order == []


def test_a_deadline_ends_a_wait() -> None:
    """synchronize says that it did not suffice."""

    class Stuck(Threaded):
        go_on = threading.Event()

        def _copy(self, _batch: Batch, /) -> None:
            self.go_on.wait()

    device = Stuck(Counters())
    event = device.offload(Batch([Copy(_tensor(0), _tensor(1))]))
    assert not device.synchronize(event, 0.01)
    assert not device.done(event)
    Stuck.go_on.set()
    assert device.synchronize(event, None)
    device.close()


def test_a_snapshot_does_not_see_later_writes() -> None:
    """It is made on the compute stream, so what follows there comes after it."""
    device = HostDevice(Counters())
    source, target = _tensor(1), _tensor(0)
    (snapshot,) = device.snapshot([source])
    source.fill_(2)
    event = device.offload(Batch([Copy(target, snapshot.data)]))
    device.release(snapshot, event)
    assert device.done(event)
    assert torch.equal(target, _tensor(1))
    device.close()


def test_close_leaves_no_thread() -> None:
    """Also with copies that nobody waited for."""
    before = set(threading.enumerate())
    device = SlowDevice(Counters())
    for _ in range(50):
        device.offload(Batch([Copy(_tensor(0), _tensor(1))]))
    device.close()
    assert not set(threading.enumerate()) - before


def test_little_is_copied_at_once_where_nothing_is_waiting() -> None:
    """And never ahead of what was given before."""
    device = SlowDevice(Counters())
    device.inline_bytes = 1000
    first = _tensor(0)
    assert device.done(device.offload(Batch([Copy(first, _tensor(1))])))
    second, third = _tensor(0, 2000), _tensor(0)
    earlier = device.offload(Batch([Copy(second, _tensor(2, 2000))]))
    later = device.offload(Batch([Copy(third, _tensor(3))]))
    device.synchronize(later)
    assert device.done(earlier)
    assert torch.equal(third, _tensor(3))
    device.close()


def test_an_interrupt_within_a_small_copy_is_the_trainings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is raised, once, and copying goes on: at once again when the thread has ended one."""
    device = HostDevice(Counters())
    source, target = _tensor(3), _tensor(0)
    batch = Batch([Copy(target, source)])

    def interrupted(_batch: Batch, /) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(device, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            device.offload(batch)
    assert device.synchronize(device.offload(batch), 10) and bool((target == 3).all())
    target.fill_(0)
    assert device.done(device.offload(batch)) and bool((target == 3).all())
    device.close()
