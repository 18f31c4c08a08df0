"""RoBERTa-base encoder without head or pooler (Liu et al., https://arxiv.org/abs/1907.11692).

Names and shapes are those of Hugging Face's `RobertaModel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from checkflow.models._recipe import check_at_most, check_positive, train_as_model_does
from checkflow.training import Training

PADDING = 1  # the token that pads; positions count from the next number


@dataclass(frozen=True, slots=True)
class Config:
    vocabulary: int = 50265
    positions: int = 514
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    dropout: float = 0.1


SMALL = Config(vocabulary=100, positions=34, width=32, layers=2, heads=2, mlp_width=64)


class TokenType(nn.Module):
    """The embedding of RoBERTa's only token type: zeros that are not trained, kept so that published weights load."""

    weight: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(1, width))


class Embeddings(nn.Module):
    """Tokens (batch, length) -> (batch, length, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width, padding_idx=PADDING)
        self.position_embeddings = nn.Embedding(config.positions, config.width, padding_idx=PADDING)
        self.token_type_embeddings = TokenType(config.width)
        self.LayerNorm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens.ne(PADDING).long()
        positions = present.cumsum(1) * present + PADDING
        x = self.word_embeddings(tokens) + self.token_type_embeddings.weight + self.position_embeddings(positions)
        embedded: Tensor = self.dropout(self.LayerNorm(x))
        return embedded


class SelfAttention(nn.Module):
    """(batch, length, width) -> the same shape, before the output projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        return mixed.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """Projection, dropout, residual, norm: (batch, length, inputs) -> (batch, length, width)."""

    def __init__(self, inputs: int, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.width)
        self.LayerNorm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        result: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return result


class Layer(nn.Module):
    """(batch, length, width) -> the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": Output(config.width, config)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.width, config.mlp_width)})
        self.output = Output(config.mlp_width, config)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        result: Tensor = self.output(functional.gelu(self.intermediate["dense"](x)), x)
        return result


class Roberta(nn.Module):
    """Tokens (batch, length) -> features (batch, length, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config.layers))})
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embeddings(tokens)
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = layer(x)
        return x


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding):
        with torch.no_grad():
            module.weight[PADDING].zero_()


def training(batch_size: int = 32, optimizer: str = "sgd", sequence_length: int = 256, small: bool = False) -> Training:
    """RoBERTa-base on 256 tokens; `small` has two narrow layers and at most 16 tokens."""
    check_positive(batch_size=batch_size, sequence_length=sequence_length)
    config = SMALL if small else Config()
    check_at_most(Config().positions - PADDING - 1, sequence_length=sequence_length)
    length = min(sequence_length, 16) if small else sequence_length
    tokens = torch.randint(PADDING + 1, config.vocabulary, (batch_size, length))
    return train_as_model_does(Roberta(config), (tokens,), optimizer, small=small)
