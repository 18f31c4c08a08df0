"""What a killed job's savers still have is waited for by a job of another number of ranks, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_group import groups, together

import checkflow
from checkflow.checkpointing.seeking import Seeking
from checkflow.checkpointing.together import Together
from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.group import Group
from checkflow.errors import StoreBusyError
from checkflow.store.both.lock import StoreLock
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.reader import newest
from checkflow.store.trainer.handle import StoreHandle

LAYOUT = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (700,)),)),))
KILLED = """
import os, pathlib, signal, sys
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.reader import newest
from checkflow.store.trainer.handle import StoreHandle

layout = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (700,)),)),))
handle = StoreHandle.open(pathlib.Path(sys.argv[1]), [layout], notify=print)
with handle.shared.locked(timeout_s=60):  # which the saver needs, for an instant now and then
    os.kill(handle.saver_pid, signal.SIGSTOP)
slot = handle.acquire()
handle.stage(slot, 41, b"{}")
print(handle.saver_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_in(directory: Path) -> int:
    """A trainer staged iteration 41 there and was killed, and its saver, whose pid this is, stands still."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(directory)], capture_output=True, text=True, check=False)
    return int(killed.stdout)


def newest_in(directory: Path) -> int:
    found = newest(directory).checkpoint
    return 0 if found is None else found.iteration


def silent(_: str) -> None:
    """Nobody hears it."""


class Savers:
    """That stand still; each is let run on once something is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._pids: list[int] = []

    def left_in(self, directory: Path) -> None:
        self._pids.append(killed_in(directory))

    def tell(self, line: str) -> None:
        self.told.append(line)
        self.go_on()

    def go_on(self) -> None:
        if self._pids:
            os.kill(self._pids.pop(), signal.SIGCONT)


@pytest.fixture
def savers() -> Iterator[Savers]:
    found = Savers()
    yield found
    for _ in range(2):
        found.go_on()


@pytest.mark.parametrize("left", ["rank-0-of-2", "."])
def test_ranks_in_another_number_wait_and_one_of_them_says_so(tmp_path: Path, left: str, savers: Savers) -> None:
    savers.left_in(tmp_path / left)
    together(groups(3), lambda group: Together.of(group, tmp_path, silent, Hearers(pytest.fail, savers.tell)))
    assert newest_in(tmp_path / left) == 41
    (line,) = savers.told
    assert line.startswith(f"{tmp_path / left}: waiting for the previous run's saver, process ")


def test_one_process_waits_for_ranks_before_it_decides_how_it_trains(tmp_path: Path, savers: Savers) -> None:
    directories = [tmp_path / f"rank-{rank}-of-2" for rank in range(2)]
    for directory in directories:
        savers.left_in(directory)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with checkflow.attach(model, optimizer, store=tmp_path, start_over=True, notify=pytest.fail, tell=savers.tell):
        assert [newest_in(directory) for directory in directories] == [41, 41]
    waits = [line.split(": ")[0] for line in savers.told if "waiting for" in line]
    assert waits == list(map(str, directories))


def test_a_directory_that_no_rank_writes_to_any_more_is_waited_for(tmp_path: Path, savers: Savers) -> None:
    """On this machine another rank of as many ran before."""
    roots = [tmp_path / "one", tmp_path / "other"]
    savers.left_in(roots[0] / "rank-1-of-2")

    def seek(group: Group) -> None:
        own = roots[group.rank] / f"rank-{group.rank}-of-2"
        own.mkdir(parents=True)
        Seeking(group, roots[group.rank], own, lambda _: None, tell=savers.tell).own()

    assert together(groups(2), seek) == [None, None]
    assert newest_in(roots[0] / "rank-1-of-2") == 41
    assert len(savers.told) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_a_job_in_another_number_that_still_trains_is_met(tmp_path: Path, size: int) -> None:
    with StoreHandle.open(tmp_path / "rank-1-of-2", [LAYOUT], notify=silent):
        if size == 1:
            with pytest.raises(StoreBusyError, match="rank-1-of-2: another trainer, process"):
                Together.of(None, tmp_path, silent, Hearers(silent, silent))
        else:
            said = together(groups(3), lambda group: Together.of(group, tmp_path, silent, Hearers(silent, silent)))
            assert all("rank-1-of-2: another trainer, process" in str(each) for each in said)
    StoreLock.acquire(tmp_path / "rank-1-of-2", silent, timeout_s=60).close()
    assert Together.of(None, tmp_path, silent, Hearers(silent, silent)) is None
