"""Llama-3.1-8B in fp32."""

from __future__ import annotations

import torch

from checkflow.models._llama import Config, Llama
from checkflow.models._recipe import check_at_most, check_positive, train_language_model
from checkflow.training import Training

FULL = Config(layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, head_width=128, tied=False, rope_factor=8.0)
SMALL = Config(
    layers=2, width=32, heads=4, kv_heads=2, mlp_width=64, head_width=8, tied=False, rope_factor=8.0, vocabulary=100
)


def training(batch_size: int = 1, optimizer: str = "sgd", sequence_length: int = 2048, small: bool = False) -> Training:
    """Llama-3.1-8B on 2048 tokens; `small` has two narrow layers and at most 16 tokens."""
    config = SMALL if small else FULL
    check_positive(batch_size=batch_size, sequence_length=sequence_length)
    check_at_most(config.positions, sequence_length=sequence_length)
    length = min(sequence_length, 16) if small else sequence_length
    tokens = torch.randint(config.vocabulary, (batch_size, length + 1))
    model = Llama(config)
    return train_language_model(model, tokens, optimizer, head=model.lm_head)
