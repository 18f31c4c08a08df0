"""One rank of a job that torchrun starts again: rank_to_restart.py STORE ITERATIONS FAILURE...

A failure is LIFE:RANK:ITERATION:HOW, "raises" or "killed"; it waits until this rank's part of the checkpoint before is
staged, which a busy machine takes its time for. Said are what it resumed, and in the end the state's digest.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import checkflow

PAUSE_S = 0.02  # as an iteration of something larger, in which ranks agree on the one before


def main(store: str, iterations: str, *failures: str) -> None:
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    due = {(int(at), int(of), int(when)): how for at, of, when, how in (each.split(":") for each in failures)}
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(model, optimizer, store=Path(store), when_full="wait", peers_deadline_s=60.0) as ckpt:
        resumed = ckpt.restore()
        sys.stdout.write(f"life {life} rank {rank} resumed {resumed}\n")
        sys.stdout.flush()
        for iteration in range(resumed, int(iterations)):
            rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * iteration + rank))
            torch.autograd.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
            time.sleep(PAUSE_S)
            how = due.get((life, rank, iteration))
            while how and (ckpt.status().staged_iteration or 0) < iteration:
                time.sleep(0.001)
            match how:
                case "raises":
                    raise ValueError("no more")
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
    held = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    sys.stdout.write(f"rank {rank} ends with {hashlib.sha256(held).hexdigest()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
