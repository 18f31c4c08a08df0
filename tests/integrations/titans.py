"""A training as torchtitan's Trainer runs it, with torchtitan's optimizers, schedulers and loader; killed, resumed."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lives
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import DataloaderExhaustedError, ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from checkflow.integrations.torchtitan import CheckflowManager

STEPS, EPOCH, BATCH, ACCUMULATED, WIDTH, VALIDATE = 12, 10, 2, 2, 8, 4  # 2.5 steps are an epoch of the data


class Text(torch.utils.data.IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Endless, and knows its position, as torchtitan's are."""

    def __init__(self, rank: int) -> None:
        self.at = 0
        self.first = rank * EPOCH

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            number, self.at = self.first + self.at % EPOCH, self.at + 1
            x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
            yield {"input": x}, x.flip(0)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def divide(model: nn.Sequential, kind: str) -> None:
    """As torchtitan does, which has FSDP2 for replicas, too."""
    shape = (1, torch.distributed.get_world_size()) if kind == "sharded" else (torch.distributed.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)


class Trainer:
    """The order of calls is that of torchtitan's."""

    def __init__(self, folder: Path, kind: str, when: str, at: int) -> None:
        self.when, self.at, self.folder = when, at, folder
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        if lives.in_ranks():
            torch.distributed.init_process_group("gloo")
            divide(model, kind)
            torch.manual_seed(rank)
        self.model_parts = [model]
        self.optimizers = default_adamw(lr=0.01, fused=False, foreach=True).build(model_parts=self.model_parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=3, decay_ratio=0.5)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.dataloader = ParallelAwareDataloader(Text(rank), rank, ranks, batch_size=BATCH)
        self.step = self.ntokens_seen = 0
        self.checkpointer = CheckflowManager.Config(enable=when != "plain", interval=2, keep_latest_k=2).build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(lives.store(folder)),
        )

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        batches = iter(self.dataloader)
        while self.step < STEPS:
            self.step += 1
            try:
                self.train_step(batches)
            except DataloaderExhaustedError:
                break
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
            if lives.in_ranks():
                time.sleep(0.02)  # so that ranks agree on each checkpoint before the next
            if self.step % VALIDATE == 0:
                self.validate()
        self.checkpointer.close()

    def train_step(self, batches: Iterator[Any]) -> None:
        self.optimizers.zero_grad()
        for micro in range(ACCUMULATED):
            inputs, labels = next(batches)
            self.note(f"{self.step} {inputs['input'][:, 0].tolist()}")
            self.ntokens_seen += labels.numel()
            torch.autograd.backward((self.model_parts[0](inputs["input"]) - labels).square().mean() / ACCUMULATED)
            self.reached("micro" if micro == 0 else "update")
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()

    def validate(self) -> None:
        with torch.no_grad():
            self.model_parts[0].eval()(torch.ones(1, WIDTH))
        self.reached("validate")
        self.model_parts[0].train()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def reached(self, when: str) -> None:
        if (when, self.step) == (self.when, self.at):
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, line: str) -> None:
        with (self.folder / "order").open("a") as file:
            file.write(f"{line}\n")

    def final(self) -> dict[str, object]:
        content = hashlib.sha256()
        for optimizer in self.optimizers:
            for slots in optimizer.state.values():
                for _, tensor in sorted(slots.items()):
                    content.update(local(tensor).numpy().tobytes())
        for tensor in self.model_parts[0].state_dict().values():
            content.update(local(tensor).numpy().tobytes())
        content.update(torch.get_rng_state().numpy().tobytes())
        return self.state_dict() | {
            "tensors": content.hexdigest(),
            "rates": [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups],
            "scheduler": self.lr_schedulers.state_dict(),
            "loader": str(self.dataloader.state_dict()),
        }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(folder: Path, kind: str, when: str, at: int) -> dict[str, object]:
    trainer = Trainer(folder, kind, when, at)
    trainer.train()
    return trainer.final()


if __name__ == "__main__":
    torch.set_num_threads(1)
    lives.main(train)
