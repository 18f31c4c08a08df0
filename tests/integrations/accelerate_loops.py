"""A loop of Accelerate's, in processes that are killed once so many iterations are done, and resumed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lives
import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Sampler

from checkflow.integrations.accelerate import attach

ITEMS, BATCH, ACCUMULATED, EPOCHS = 21, 2, 3, 3  # 11 batches an epoch are 4 iterations, the last of 2


class Noisy(Dataset[torch.Tensor]):
    """Draws from every global generator for each item, and notes which were loaded."""

    def __init__(self, items: int, file: Path | None = None) -> None:
        self.rows = torch.randn(items, 4, generator=torch.Generator().manual_seed(1))
        self.file = file

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{index}\n")
        return self.rows[index] + 0.1 * torch.randn(4) + random.random() + np.random.rand()


class Counting(torch.nn.Linear):
    """With a buffer that each pass writes, of an evaluation, too."""

    seen: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += inputs.mean()
        return super().forward(inputs)


class Bucketed(Sampler[list[int]]):
    """A batch sampler of the user's, whose order is one of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (order[low : low + BATCH] for low in range(0, ITEMS, BATCH))


LOADERS: dict[str, dict[str, Any]] = {
    "sequential": {"batch_size": BATCH},
    "shuffled": {"batch_size": BATCH, "shuffle": True},
    "generator": {"batch_size": BATCH, "shuffle": True, "generator": True},
    "workers": {"batch_size": BATCH, "shuffle": True, "num_workers": 2},
    "persistent": {"batch_size": BATCH, "shuffle": True, "num_workers": 1, "persistent_workers": True},
    "bucketed": {"batch_sampler": Bucketed()},
}


def shard(accelerator: Accelerator) -> None:
    """Have it prepare models with FSDP2, which it does on accelerators only: on CPUs it ignores the plugin."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, cpu_ram_efficient_loading=False
    )
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP


class Life:
    def __init__(
        self, folder: Path, loader: str, *, seedable: bool, stateful: bool, listed: bool = True, fsdp: bool = False,
        dispatch: bool = False,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        rank = int(os.environ.get("RANK", "0"))  # each draws its own
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=ACCUMULATED,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=seedable, use_stateful_dataloader=stateful, dispatch_batches=dispatch or None
            ),
        )
        if fsdp:
            shard(self.accelerator)
        options = dict(LOADERS[loader])
        if "generator" in options:
            options["generator"] = torch.Generator().manual_seed(5)
        if "num_workers" in options:
            torch.set_num_threads(1)
        data: Any = Noisy(ITEMS, folder / "loaded")
        if "num_workers" in options:
            data = data.rows  # workers' own generators are not resumed
        evaluated: Any = DataLoader(Noisy(6), 2, shuffle=True)
        if not listed:
            unseen: Any = Noisy(6).rows
            evaluated = DataLoader(unseen, **(options | {"batch_size": 2, "shuffle": False}))
        self.model: Any = torch.nn.Sequential(Counting(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        prepared = self.accelerator.prepare(self.model, optimizer, scheduler, DataLoader(data, **options), evaluated)
        self.model, self.optimizer, self.scheduler, self.loader, self.evaluated = prepared
        self.listed = [self.loader, self.evaluated] if listed else [self.loader]
        self.held: dict[str, Any] = {"history": []}
        self.done = 0

    def run(self, when: str, step: int) -> None:
        """As its users write it, and killed at a moment."""
        accelerator, model, optimizer, scheduler = self.accelerator, self.model, self.optimizer, self.scheduler
        ckpt = None
        if when != "plain":
            ckpt = attach(
                accelerator, model, optimizer, loader=self.listed, scheduler=scheduler,
                store=lives.store(self.folder), extra={"held": self.held},
                when_full="wait" if lives.in_ranks() else "skip",
            )  # fmt: skip
            self.done = ckpt.restore()

        def reached(moment: str) -> None:
            if (moment, self.done) == (when, step):
                os.kill(os.getpid(), signal.SIGKILL)

        for epoch in range(self.loader.iteration, EPOCHS):
            model.train()
            for batch in self.loader:
                reached("batch")
                with (self.folder / "order").open("a") as file:
                    file.write(f"{self.done + 1} {epoch} {batch.flatten().tolist()}\n")
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    self.held["history"].append(accelerator.gather(loss.detach()).mean().item())
                    reached("update")
                    self.done += 1
                    if ckpt is not None:
                        ckpt.step()
                else:
                    reached("accumulation")
            reached("border")
            model.eval()
            with torch.no_grad():
                for batch in self.evaluated:
                    reached("evaluation")
                    self.held["history"].append(accelerator.gather_for_metrics(model(batch)).sum().item())
        if ckpt is not None:
            ckpt.close()

    def final(self) -> dict[str, object]:
        """All that the training leaves."""
        content = hashlib.sha256()
        state = self.optimizer.state_dict()
        slots = [value for _, one in sorted(state["state"].items()) for _, value in sorted(one.items())]
        for tensor in (*self.model.state_dict().values(), *slots):
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            content.update(part.contiguous().numpy().tobytes())
        generators = (random.getstate(), np.random.get_state()[1:3], torch.get_rng_state().tolist())  # type: ignore[index]
        return {
            "tensors": content.hexdigest(),
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
            "scheduler": self.scheduler.state_dict(),
            "history": self.held["history"],
            "generators": hashlib.sha256(repr(generators).encode()).hexdigest(),
            "counts": [self.done, self.accelerator.step, *(one.iteration for one in self.listed)],
        }


def train(folder: Path, kind: str, when: str, step: int) -> dict[str, object]:
    """A kind is a loader and flags, "shuffled-seedable-stateful"; what is evaluated with may be "unlisted"."""
    loader, *flags = kind.split("-")
    one = Life(
        folder, loader, seedable="seedable" in flags, stateful="stateful" in flags, listed="unlisted" not in flags,
        fsdp="fsdp" in flags,
    )  # fmt: skip
    one.run(when, step)
    return one.final()


if __name__ == "__main__":
    torch.set_num_threads(1)
    lives.main(train)
