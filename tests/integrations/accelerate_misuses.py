"""What users do wrong in several processes, each in a job of its own; what each rank is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lives
import torch
from accelerate_loops import Life

from checkflow.errors import CheckflowError
from checkflow.integrations.accelerate import attach


def attached(one: Life, **options: Any) -> Any:
    return attach(one.accelerator, one.model, one.optimizer, store=lives.store(one.folder), **options)


def life(folder: Path, **options: Any) -> Life:
    return Life(folder, "shuffled", seedable=False, stateful=False, **options)


class FullyShardedDataParallel(torch.nn.Module):
    """Has the name of torch's, which needs an accelerator to exist."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def fsdp1(folder: Path) -> None:
    one = life(folder)
    one.model = FullyShardedDataParallel(one.model)
    attached(one)


def dispatched(folder: Path) -> None:
    one = life(folder, dispatch=True)
    attached(one, loader=one.loader)


def attaches(folder: Path) -> None:
    """On the main process only."""
    one = life(folder)
    if one.accelerator.is_main_process:
        attached(one, peers_deadline_s=0.5)


def restores(folder: Path) -> None:
    one = life(folder)
    with attached(one, peers_deadline_s=0.5) as ckpt:
        if one.accelerator.is_main_process:
            ckpt.restore()


KINDS = {"fsdp1": fsdp1, "dispatched": dispatched, "attaches": attaches, "restores": restores}


def misuse(folder: Path, kind: str, _when: str, _step: int) -> str:
    said = ""
    try:
        KINDS[kind](folder)
    except CheckflowError as error:
        said = str(error)
    torch.distributed.barrier()  # the first one's process has what the others reach it by
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    lives.main(misuse)
