"""A training script that survives being killed at any moment.

    checkflow compile train.py --device measure -o schedule.json
    python train.py --schedule schedule.json --store checkpoints

Run the second command again after a kill: it goes on where it was. Without --store it trains uninterrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import TensorDataset

import checkflow

IMAGES, CLASSES = 512, 1000
Batch = tuple[torch.Tensor, ...]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(1024, 4096), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4096, CLASSES),
    )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def training(batch_size: int = 32) -> checkflow.Training:
    """What `checkflow compile` looks for."""
    model, optimizer = build()
    images, labels = torch.randn(batch_size, 3, 64, 64), torch.randint(CLASSES, (batch_size,))
    return checkflow.Training(model, optimizer, lambda: train(model, optimizer, images, labels))


def endless(loader: checkflow.ResumableLoader[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of every byte of weights, buffers and optimizer state."""
    content = hashlib.sha256()
    slots = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    for tensor in (*model.state_dict().values(), *slots):
        content.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return content.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule")
    parser.add_argument("--store", help="directory of the checkpoints; without it none are made")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    chosen = parser.parse_args()
    model, optimizer = build()
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(
        torch.randn(IMAGES, 3, 64, 64, generator=generator), torch.randint(CLASSES, (IMAGES,), generator=generator)
    )
    loader: checkflow.ResumableLoader[Batch] = checkflow.ResumableLoader(
        dataset, batch_size=chosen.batch_size, shuffle=True, seed=2
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=chosen.iterations)

    with contextlib.ExitStack() as stack:
        ckpt, first = None, 0
        if chosen.store:
            ckpt = stack.enter_context(
                checkflow.attach(
                    model, optimizer, schedule=chosen.schedule, store=chosen.store, scheduler=scheduler, loader=loader,
                    when_full="wait", notify=lambda line: print(line, flush=True),
                )
            )  # fmt: skip
            first = ckpt.restore()
            print(f"starting at iteration {first}", flush=True)
        batches = endless(loader)
        for i in range(first, chosen.iterations):
            loss = train(model, optimizer, *next(batches))
            scheduler.step()
            if ckpt is not None:
                ckpt.step()
            print(f"iteration {i + 1}: loss {loss:.4f}", flush=True)
    print(f"digest {digest(model, optimizer)}")


if __name__ == "__main__":
    main()
