"""A trainer without standard streams, as a daemon is: nothing that it opens is taken for one, and all is durable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkflow.store.format.reader import newest

SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch, checkflow

torch.set_num_threads(1)
store, when = pathlib.Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())

def step():
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()
    os.system("echo of the user; echo of the user >&2")

ckpt = checkflow.attach(
    model, optimizer, store=store, persist_every=checkflow.PersistEvery(iterations=1), notify=lambda _: None
)
ckpt.restore()
step()
if when == "later":
    ckpt.save()
    os.closerange(0, 3)
    saver = json.loads((store / "lock").read_text())["saver_pid"]
    os.kill(saver, signal.SIGKILL)
    while json.loads((store / "lock").read_text())["saver_pid"] == saver:
        step()
        time.sleep(0.01)
step()
streams = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
ckpt.close()
store.with_name("said").write_text(json.dumps(streams))
"""


@pytest.mark.parametrize(
    ("around", "when"),
    [("<&- >&- 2>&-", "at the start"), ("<&-", "at the start"), ("2>&-", "at the start"), ("", "later")],
)
def test_closed_streams_cost_no_checkpoint(around: str, when: str, tmp_path: Path) -> None:
    """Of the trainer that was started so, and of one that closes them while it trains and needs another saver."""
    store = tmp_path / "store"
    shell = f'"$@" </dev/null >/dev/null 2>/dev/null {around}'
    command = [sys.executable, "-c", SCRIPT, str(store), when]
    subprocess.run(["bash", "-c", shell, "bash", *command], check=True, timeout=100)
    assert json.loads((tmp_path / "said").read_text()) == ["/dev/null"] * 3
    found = newest(store)
    assert found.checkpoint is not None and not found.skipped
    assert found.checkpoint.iteration >= 2  # of close(), or of the saver that was started anew
