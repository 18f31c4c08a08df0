"""What is trained: the same model from the same seed under each tool."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import checkflow
from checkflow import models

from .mixed_adamw import MixedAdamW

SEED = 7


@dataclass(frozen=True, slots=True)
class Workload:
    """A training, and where it runs."""

    what: str
    factory: Callable[[], checkflow.Training]
    device: str = "cpu"
    threads: int | None = None  # of the training on the CPU; None: as torch has it, one for each core

    def build(self) -> checkflow.Training:
        """On its device, from the seed."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        torch.manual_seed(SEED)
        with torch.device(self.device):
            return self.factory()

    def missing(self) -> str | None:
        """Why it cannot run here; None where it can."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "needs CUDA, and this machine has none"
        return None


def convolutions(width: int = 32, side: int = 32, batch: int = 16) -> checkflow.Training:
    """Convolutions with BatchNorm, a wide head with dropout, AdamW."""
    model = nn.Sequential(
        *_block(3, width), nn.MaxPool2d(2), *_block(width, 2 * width), nn.MaxPool2d(2), *_block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, 32 * width), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(32 * width, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))

    def iteration() -> None:
        torch.autograd.backward(functional.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


def gpt2(batch: int, length: int) -> checkflow.Training:
    """GPT-2 small, AdamW, dropout 0.1."""
    return models.factory("gpt2")(batch_size=batch, optimizer="adamw_foreach", sequence_length=length)


def llama(batch: int, length: int, *, small: bool = False) -> checkflow.Training:
    """Llama-3.2-1B: weights in bfloat16, master weights and both moments of AdamW in float32."""
    drawn = models.factory("llama_1b")(batch_size=batch, sequence_length=length, small=small)
    model = drawn.models[0].to(torch.bfloat16)
    optimizer = MixedAdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(100 if small else 128256, (batch, length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss() -> Tensor:
        logits: Tensor = model(inputs)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def iteration() -> None:
        torch.autograd.backward(loss())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


WORKLOADS = {
    "tiny": Workload("a small convolutional net (kills, faults, tests)", partial(convolutions, 4, 8, 4), threads=1),
    "conv": Workload(
        "convolutions with BatchNorm, dropout, AdamW; 16 images of 32x32, one thread", convolutions, threads=1
    ),
    "gpt2": Workload("GPT-2 small, AdamW, dropout; 32 tokens", partial(gpt2, 1, 32)),
    "tiny-llama": Workload("two narrow Llama layers in bfloat16 (tests)", partial(llama, 1, 16, small=True), threads=1),
    "conv-cuda": Workload(
        "convolutions with BatchNorm, dropout, AdamW; 64 images", partial(convolutions, batch=64), "cuda"
    ),
    "gpt2-cuda": Workload("GPT-2 small, AdamW, dropout; 8 x 1024 tokens", partial(gpt2, 8, 1024), "cuda"),
    "llama-1b-cuda": Workload(
        "Llama-3.2-1B in bfloat16, AdamW in float32; 2048 tokens", partial(llama, 1, 2048), "cuda"
    ),
}


def state_bytes(training: checkflow.Training) -> int:
    """What a checkpoint holds: weights, buffers, optimizer state. Tied weights count once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(training))


def digest(training: checkflow.Training) -> str:
    """A hash of every byte of the state and of the random generators."""
    content = hashlib.sha256()
    for tensor in (*_tensors(training), torch.get_rng_state()):
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def _tensors(training: checkflow.Training) -> list[Tensor]:
    model, optimizer = training.models[0], training.optimizers[0]
    slots = [
        value
        for parameter in model.parameters()
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *slots)}.values())
