"""GPT-2 small (Radford et al., 2019), its output layer tied to the word embedding.

Names and shapes are those of Hugging Face's `GPT2LMHeadModel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from checkflow.models._recipe import check_at_most, check_positive, train_language_model
from checkflow.training import Training


@dataclass(frozen=True, slots=True)
class Config:
    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1


SMALL = Config(vocabulary=100, positions=32, width=32, layers=2, heads=2)


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as in the published weights."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=std))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """(batch, length, width) -> the same shape, causal."""

    def __init__(self, config: Config, residual_std: float) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = Conv1D(config.width, 3 * config.width, std=0.02)
        self.c_proj = Conv1D(config.width, config.width, std=residual_std)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: Tensor = self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(2)))
        return result


class MLP(nn.Module):
    """(batch, length, width) -> the same shape."""

    def __init__(self, config: Config, residual_std: float) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.width, 4 * config.width, std=0.02)
        self.c_proj = Conv1D(4 * config.width, config.width, std=residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh")))
        return result


class Block(nn.Module):
    """(batch, length, width) -> the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        residual_std = 0.02 / math.sqrt(2 * config.layers)
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config, residual_std)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class Decoder(nn.Module):
    """Tokens (batch, length) -> features (batch, length, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.h:
            x = block(x)
        features: Tensor = self.ln_f(x)
        return features


class GPT2(nn.Module):
    """Tokens (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.transformer = Decoder(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(tokens))
        return logits


def training(batch_size: int = 8, optimizer: str = "sgd", sequence_length: int = 1024, small: bool = False) -> Training:
    """GPT-2 small on 1024 tokens; `small` has two narrow layers and at most 16 tokens."""
    check_positive(batch_size=batch_size, sequence_length=sequence_length)
    config = SMALL if small else Config()
    check_at_most(Config().positions, sequence_length=sequence_length)
    length = min(sequence_length, 16) if small else sequence_length
    tokens = torch.randint(config.vocabulary, (batch_size, length + 1))
    return train_language_model(GPT2(config), tokens, optimizer)
