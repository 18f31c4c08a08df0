"""How a Llama is trained, and divided among ranks: by FSDP2, as torchtitan (https://arxiv.org/abs/2410.06511) does."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from checkflow.models._llama import Config, Llama
from checkflow.models._recipe import check_at_most, check_positive, train_language_model
from checkflow.training import Training


def train_llama(
    config: Config, batch_size: int, optimizer: str, sequence_length: int, *, small: bool, sharded: bool
) -> Training:
    """A Llama that predicts each next token, divided among ranks or not; a small one has at most 16 tokens."""
    check_positive(batch_size=batch_size, sequence_length=sequence_length)
    check_at_most(config.positions, sequence_length=sequence_length)
    length = min(sequence_length, 16) if small else sequence_length
    tokens = torch.randint(config.vocabulary, (batch_size, length + 1))
    model = Llama(config)
    if sharded:
        shard(model)
    return train_language_model(model, tokens, optimizer, head=model.lm_head)


def shard(model: Llama) -> None:
    """Each layer is gathered by itself, the rest together; layers run again in the backward pass.

    State, sums of gradients and logits are float32, arithmetic is bfloat16. torch.distributed has to be initialized.
    """
    model.model.recomputes = True
    layers = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rest = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=layers)
    fully_shard(model, mp_policy=rest)
