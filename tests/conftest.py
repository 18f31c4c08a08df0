"""Hypothesis profiles (HYPOTHESIS_PROFILE=nightly tries ten times as many instances as ci) and shared fixtures."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # the tensors of tests are tiny, and idle threads that spin slow all processes down
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process: tests leave no other
os.environ.pop("COLUMNS", None)  # read when checkflow.cli is imported; who sets it asks for that width

import pytest
import torch
from bucket_server import BucketServer, bucket_server
from hypothesis import HealthCheck, settings
from processes import children, command

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)  # a solver's start-up is not the test's fault
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts a job in the background ignores Ctrl-C

# The same instances each time, so that what fails was broken by the change; nightly looks for new ones.
settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=SLOW, derandomize=True)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=SLOW, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def threads_are_put_back() -> Iterator[None]:
    """As many as there were, after a test that takes others."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# Files whose tests take a minute or more: begun last, one of them would be waited for alone.
LONGEST = ("notebooks/test_notebooks.py", "torturing/", "checkpointing/test_hostile_stores.py", "peers/", "docs/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first; the others in their order."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(here).as_posix()
        return next((rank for rank, long in enumerate(LONGEST) if name.startswith(long)), len(LONGEST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """What was imported stays: a collection, of which tracing asks for one each time, need not look at all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def waits_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long one takes is the machine's affair: tests of what is told of a wait say from when on it is."""
    monkeypatch.setattr("checkflow.store.trainer.lingering.PATIENT_S", math.inf)


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    """Where something was compiled the runtime trusts fewer guards, in each test after it."""
    yield
    if "torch._dynamo" in sys.modules and torch._dynamo.utils.counters["frames"]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """A test that leaves a saver behind breaks those after it, which pass alone."""
    before = set(children())
    yield
    deadline = time.monotonic() + 60
    while left := set(children()) - before:
        assert time.monotonic() < deadline, [command(pid) for pid in left]
        time.sleep(0.005)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for thousands of small files that nobody wants to wait for."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def running_server() -> Iterator[BucketServer]:
    with bucket_server() as server:
        yield server


@pytest.fixture
def server(running_server: BucketServer) -> BucketServer:
    """An object store over HTTP, empty."""
    running_server.anew()
    return running_server
