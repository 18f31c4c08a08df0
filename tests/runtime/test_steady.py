"""A long run stays as it was."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import small_trainings as trainings
from hypothesis import settings
from torn import random_schedule, rig

from checkflow.runtime.host import HostDevice

ITERATIONS = 10_000 if settings.get_current_profile_name() == "nightly" else 2_000


class Threaded(HostDevice):
    """Leaves every copy to the thread."""

    inline_bytes = -1


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("device", [HostDevice, Threaded])
def test_memory_descriptors_and_threads_stay_flat(device: type[HostDevice]) -> None:
    """Thousands of iterations with a checkpoint each, on the host's own copy thread."""
    made = rig(trainings.adamw_foreach, random_schedule(trainings.adamw_foreach, 0), device=device)

    def run(iterations: int) -> tuple[int, int, int, int]:
        for _ in range(iterations):
            made.run(1)
            made.expected.clear()
            made.sink.staged.clear()
            made.sink.records.clear()
        gc.collect()
        objects = len(gc.get_objects())
        return _resident_bytes(), objects, len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208

    resident, objects, descriptors, threads = run(ITERATIONS // 4)
    later = run(ITERATIONS - ITERATIONS // 4)
    assert later[0] - resident < 4 * 2**20
    assert later[1] - objects < 500
    assert later[2:] == (descriptors, threads)
    made.close()
    assert len(made.sink.order) == ITERATIONS
