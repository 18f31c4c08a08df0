"""Llama-3.1-8B in fp32."""

from __future__ import annotations

from checkflow.models._llama import Config
from checkflow.models._llama_recipe import train_llama
from checkflow.training import Training

FULL = Config(layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, head_width=128, tied=False, rope_factor=8.0)
SMALL = Config(
    layers=2, width=32, heads=4, kv_heads=2, mlp_width=64, head_width=8, tied=False, rope_factor=8.0, vocabulary=100
)


def training(
    batch_size: int = 1,
    optimizer: str = "sgd",
    sequence_length: int = 2048,
    small: bool = False,
    sharded: bool = False,
) -> Training:
    """Llama-3.1-8B on 2048 tokens; `small` has two narrow layers and at most 16 tokens.

    `sharded` divides it among the ranks of torch.distributed, with arithmetic in bfloat16.
    """
    return train_llama(SMALL if small else FULL, batch_size, optimizer, sequence_length, small=small, sharded=sharded)
