"""Llama 3 (https://arxiv.org/abs/2407.21783).

Names and shapes are those of Hugging Face's `LlamaForCausalLM`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Config:
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    tied: bool  # the output layer shares the embedding's weight
    rope_factor: float  # by how much long wavelengths are stretched
    head_width: int
    vocabulary: int = 128256
    positions: int = 131072


def rotary_frequencies(config: Config) -> Tensor:
    """(head_width / 2) angles per position, the long wavelengths stretched as Llama 3.1 does (its `scale_rope`)."""
    frequencies: list[float] = []
    for i in range(0, config.head_width, 2):
        frequency = 500000.0 ** (-i / config.head_width)
        # 8192 is the context before stretching; 1 and 4 bound the turns within it between which the two are blended.
        turns = 8192 * frequency / (2 * math.pi)
        keep = min(max((turns - 1) / (4 - 1), 0.0), 1.0)
        frequencies.append(frequency * (keep + (1 - keep) / config.rope_factor))
    return torch.tensor(frequencies, dtype=torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_width / 2) of x (batch, heads, length, head_width) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """(batch, length, width) -> the same shape, causal; `heads / kv_heads` query heads share a key and a value."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width, self.shared = config.head_width, config.heads // config.kv_heads
        self.q_proj = nn.Linear(config.width, config.heads * config.head_width, bias=False)
        self.k_proj = nn.Linear(config.width, config.kv_heads * config.head_width, bias=False)
        self.v_proj = nn.Linear(config.width, config.kv_heads * config.head_width, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Repeated rather than enable_gqa, which only some fused kernels have: the others hold a length x length matrix.
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin).repeat_interleave(self.shared, dim=1),
            value.repeat_interleave(self.shared, dim=1),
            is_causal=True,
        )
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """(batch, length, width) -> the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """(batch, length, width) -> the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.width, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Tokens (batch, length) -> features (batch, length, width)."""

    frequencies: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)
        self.recomputes = False  # layers run again in the backward pass, instead of keeping what they made

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.frequencies)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recomputes else layer(x, cos, sin)
        features: Tensor = self.norm(x)
        return features


class Llama(nn.Module):
    """Tokens (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits
