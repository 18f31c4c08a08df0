"""Every contender of the comparison saves and restores, in a process of its own, what the others save and restore."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import benchmarks_path  # noqa: F401 (makes the next ones importable)
import contenders
import pytest
from contenders import Job, Tier
from forked_workers import forked  # noqa: F401 (a fixture for each test here)
from peering.drive import Driver
from peering.orders import Attach, Detach, Done, Prepare, Restore, Restored, Saved, SaveOne, Train, Turn
from peering.processes import Process, tree, worker

TOOLS = [name for name in contenders.NAMES if name != "none"]


CASES = [("tiny", name) for name in TOOLS] + [("tiny-llama", name) for name in ("checkflow", "dcp")]


@cache
def digests(workload: str) -> list[str]:
    """Of the training's state after each iteration, without a tool."""
    with TemporaryDirectory() as name, worker(workload, "none", Path(name, "log")) as process:
        process.ask(Attach(Job(Path(name), 1, Tier.DISK, workload, Path(name))), Done)
        return [process.ask(SaveOne(), Saved).digest for _ in range(4)]


@cache
def prepared(workload: str, name: str) -> dict[str, bytes]:
    """What a tool prepares for a workload, by file."""
    with TemporaryDirectory() as folder, worker(workload, name, Path(folder, "log")) as process:
        made = Path(folder, "made")
        made.mkdir()
        process.ask(Prepare(made), Done)
        return {path.name: path.read_bytes() for path in made.iterdir()}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "store").mkdir()
    (tmp_path / "prepared").mkdir()
    return Job(tmp_path / "store", 1, Tier.DISK, "tiny", tmp_path / "prepared")


@pytest.mark.parametrize(("workload", "name"), CASES)
def test_a_new_process_goes_on_as_if_nothing_had_happened(workload: str, name: str, job: Job, tmp_path: Path) -> None:
    """Saved after three iterations, restored elsewhere, trained once more: bit for bit the uninterrupted training."""
    kind = contenders.load(name)
    assert kind.missing() is None
    job, expected = replace(job, workload=workload), digests(workload)
    if kind.prepares:
        for file, data in prepared(workload, kind.prepare.__module__.removeprefix("contenders.")).items():
            (job.prepared / file).write_bytes(data)
    with worker(workload, name, tmp_path / "log") as saver:
        saver.ask(Attach(job), Done)
        saver.ask(Train(2), Turn)
        saved = saver.ask(SaveOne(), Saved)
        saver.ask(Detach(), Done)
    assert (saved.iteration, saved.digest) == (3, expected[2])
    with worker(workload, name, tmp_path / "log") as fresh:
        fresh.ask(Attach(job), Done)
        restored = fresh.ask(Restore(), Restored)
        assert (restored.iteration, restored.digest) == (3, expected[2])
        assert fresh.ask(SaveOne(), Saved).digest == expected[3]


def test_a_tool_that_is_not_installed_is_listed_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("contenders._state.find_spec", lambda _package: None)
    with Driver(("lightning", "dcp"), tmp_path, {}, lambda _line: None) as driver:
        tools = {tool.name: tool.missing for tool in driver.report("here", "peers.py").tools}
    assert tools == {
        "lightning": "lightning is not installed; `pip install -c constraints.txt -e '.[peers]'`",
        "dcp": None,
    }


def test_a_frozen_worker_does_nothing_until_it_is_thawed(job: Job, tmp_path: Path) -> None:
    """Between its turns a tool takes nothing from the others."""
    process = Process("tiny", "none", tmp_path / "log")
    process.ask(Attach(job), Done)
    process.freeze()
    process.tell(Train(1))
    assert not process.answered(0.3)
    process.thaw()
    assert len(process.hear(Turn).times_s) == 1
    assert tree(process.pid) == [process.pid]
    process.end()


DRIVER = """
import sys, time
import benchmarks_path
from pathlib import Path
from contenders import Job, Tier
from peering.orders import Attach, Done
from peering.processes import Process

folder = Path(sys.argv[1])
process = Process("tiny", "none", folder / "log")
process.ask(Attach(Job(folder, 1, Tier.DISK, "tiny", folder)), Done)
process.freeze()
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_frozen_worker_ends_with_its_driver(tmp_path: Path) -> None:
    """A driver that is killed leaves no stopped process behind."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    frozen = os.pidfd_open(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert select.select([frozen], [], [], 30.0)[0]
    os.close(frozen)
