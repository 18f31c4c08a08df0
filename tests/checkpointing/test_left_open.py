"""A script that ends without close(): what is due becomes durable, and the process ends as it would have."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch, checkflow

torch.set_num_threads(1)
def made():
    model = torch.nn.Linear(1024, 1024)
    return model, torch.optim.AdamW(model.parameters())

everywhere = made()

def train(until):
    model, optimizer = made() if sys.argv[3] == "local" else everywhere
    terminate = {"sigterm_deadline_s": None} if sys.argv[3] == "local" else {}  # its handler would keep it
    ckpt = checkflow.attach(model, optimizer, store=sys.argv[1], tell=lambda _: None, **terminate)
    for i in range(ckpt.restore(), until):
        model(torch.randn(8, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    if sys.argv[3] == "kept":
        globals()["ckpt"] = ckpt
    if sys.argv[3] == "raises":
        raise RuntimeError("of the user's")
    if sys.argv[3] == "inside":
        model(torch.randn(8, 1024)).square().mean().backward()
        sys.exit(3)

train(int(sys.argv[2]))
"""


def run(store: Path, until: int, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(store), str(until), how]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def of_6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with six iterations, of a script that kept its checkpointer to its end."""
    store = tmp_path_factory.mktemp("of-6") / "store"
    ran = run(store, 6, "kept")
    assert ran.returncode == 0, ran.stderr
    return store


@pytest.mark.parametrize(("how", "code"), [("kept", 0), ("dropped", 0), ("local", 0), ("raises", 1), ("inside", 3)])
def test_the_last_iteration_is_durable(how: str, code: int, of_6: Path, tmp_path: Path) -> None:
    """One iteration is trained, and the script ends while that is copied."""
    store = tmp_path / "store"
    shutil.copytree(of_6, store)
    ran = run(store, 7, how)
    assert ran.returncode == code, ran.stderr
    assert ("RuntimeError: of the user's" in ran.stderr) == (how == "raises")
    assert "terminate" not in ran.stderr and "checkflow" not in ran.stderr
    assert newest(of_6) == 6 and newest(store) == 7


def newest(store: Path) -> int:
    return max(int(re.findall(r"-iteration-(\d+)", path.name)[0]) for path in store.glob("*-iteration-*"))
