"""Llama-3.2-1B in fp32."""

from __future__ import annotations

from checkflow.models._llama import Config
from checkflow.models._llama_recipe import train_llama
from checkflow.training import Training

FULL = Config(layers=16, width=2048, heads=32, kv_heads=8, mlp_width=8192, head_width=64, tied=True, rope_factor=32.0)
SMALL = Config(
    layers=2, width=32, heads=4, kv_heads=2, mlp_width=64, head_width=8, tied=True, rope_factor=32.0, vocabulary=100
)


def training(
    batch_size: int = 1,
    optimizer: str = "sgd",
    sequence_length: int = 2048,
    small: bool = False,
    sharded: bool = False,
) -> Training:
    """Llama-3.2-1B, as llama_8b is."""
    return train_llama(SMALL if small else FULL, batch_size, optimizer, sequence_length, small=small, sharded=sharded)
