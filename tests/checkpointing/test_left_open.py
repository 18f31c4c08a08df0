"""A script that ends without close(): what is due becomes durable, and the process ends as it would have."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize(("how", "code"), [("kept", 0), ("dropped", 0), ("local", 0), ("raises", 1), ("inside", 3)])
def test_the_last_iteration_is_durable(how: str, code: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for until in (6, 7):  # the second has one iteration, and ends while that is copied
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(store), str(until), how], capture_output=True, text=True
        )
        assert ran.returncode == code, ran.stderr
        assert ("RuntimeError: of the user's" in ran.stderr) == (how == "raises")
        assert "terminate" not in ran.stderr and "checkflow" not in ran.stderr
        found = [int(re.findall(r"-iteration-(\d+)", path.name)[0]) for path in store.glob("*-iteration-*")]
        assert max(found) == until
