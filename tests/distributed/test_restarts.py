"""torchrun --max-restarts: what fails is started again by it, and goes on by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("rank_to_restart.py")
ITERATIONS = 40


def job(store: Path, *failures: str, restarts: int) -> str:
    """What its ranks print. Each life has a store of its own: in the agent's, gloo may try addresses of the former."""
    asked = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command = [sys.executable, "-m", "torch.distributed.run", *asked, str(SCRIPT), str(store), str(ITERATIONS)]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ran = subprocess.run([*command, *failures], env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_job_that_torchrun_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    """A rank that raises, one that is killed, and the one that has the store, killed."""
    failures = ("0:0:10:raises", "1:1:20:killed", "2:0:30:killed")
    said = job(tmp_path / "failing", *failures, restarts=3)
    for life, earliest in ((1, 10), (2, 20), (3, 30)):
        (first, second) = re.findall(rf"life {life} rank \d resumed (\d+)", said)
        assert first == second and earliest <= int(first) <= earliest + 1
    ends = set(re.findall(r"ends with (\w+)", said))
    assert len(ends) == 1 and ends == set(re.findall(r"ends with (\w+)", job(tmp_path / "whole", restarts=0)))
