"""An attached model that is pickled or copied: the copy has nothing of checkflow, and trains by itself."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkflow

LOADS = """
import sys
sys.modules["checkflow"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert model(torch.ones(2, 4)).shape == (2, 1)
model.load_state_dict(model.state_dict())
"""


@pytest.mark.parametrize("policy", ["checkflow", "rolling"])
def test_it_is_copied_as_if_it_were_not_attached(tmp_path: Path, policy: str) -> None:
    """While its schedule is learned, and after; loaded where there is no checkflow."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(
        model, optimizer, store=tmp_path / "store", policy=policy, notify=lambda _: None, tell=lambda _: None
    ) as ckpt:
        stages = set()
        for iteration in range(60):
            torch.autograd.backward(model(torch.randn(8, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
            if ckpt.learning in stages:
                continue
            stages.add(ckpt.learning)
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            file = io.BytesIO()
            torch.save(model, file)
            copies.append(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
            for found in copies:
                other = torch.optim.AdamW(found.parameters())
                found.load_state_dict(found.state_dict())
                torch.autograd.backward(found(torch.randn(8, 4)).sum())
                other.step()
            assert ckpt.stats().iterations == iteration + 1
        assert len(stages) > 1
        (tmp_path / "model.pt").write_bytes(file.getvalue())
    subprocess.run([sys.executable, "-c", LOADS, str(tmp_path / "model.pt")], check=True)
