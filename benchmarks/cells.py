"""The cells of the evaluation: eight networks, batch 1 and 32, SGD and AdamW, on an RTX 3090 with a 63 GB/s link."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from checkflow import hardware, models
from checkflow.graph import Graph
from checkflow.trace import trace_training

NETWORKS = ("alexnet", "bert", "mnasnet", "resnet", "resnet3d", "transformer", "vgg", "vit")
BATCHES = (1, 32)
OPTIMIZERS = ("sgd", "adamw")
DEVICE = "rtx3090"
BANDWIDTH = 63_000_000_000


@dataclass(frozen=True)
class Cell:
    network: str
    batch: int
    optimizer: str
    graph: Graph
    trace_s: float

    def __str__(self) -> str:
        return f"{self.network}/{self.batch} {self.optimizer}"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the choice of cells."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    return parser


def cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    """Trace each chosen cell in turn."""
    profile = hardware.load_profile(DEVICE)
    for network in chosen.networks.split(","):
        make = models.factory(network)
        for batch in map(int, chosen.batches.split(",")):
            for optimizer in chosen.optimizers.split(","):
                settings = (("batch_size", str(batch)), ("optimizer", optimizer))
                began = time.perf_counter()
                traced = trace_training(
                    partial(make, batch_size=batch, optimizer=optimizer),
                    model=network,
                    arguments=settings,
                )
                trace_s = time.perf_counter() - began
                yield Cell(network, batch, optimizer, hardware.retime(traced.graph, profile), trace_s)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"
