"""Llama-3.1-70B in fp32."""

from __future__ import annotations

from checkflow.models._llama import Config
from checkflow.models._llama_recipe import train_llama
from checkflow.models.llama_8b import SMALL
from checkflow.training import Training

FULL = Config(layers=80, width=8192, heads=64, kv_heads=8, mlp_width=28672, head_width=128, tied=False, rope_factor=8.0)


def training(
    batch_size: int = 1,
    optimizer: str = "sgd",
    sequence_length: int = 2048,
    small: bool = False,
    sharded: bool = False,
) -> Training:
    """Llama-3.1-70B, as llama_8b is."""
    return train_llama(SMALL if small else FULL, batch_size, optimizer, sequence_length, small=small, sharded=sharded)
