"""ViT-B/16 (Dosovitskiy et al., https://arxiv.org/abs/2010.11929).

Names and shapes are those of torchvision's `vit_b_16`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from checkflow.models._recipe import check_positive, train_as_model_does
from checkflow.training import Training

_norm = partial(nn.LayerNorm, eps=1e-6)


@dataclass(frozen=True, slots=True)
class Config:
    image_side: int = 224
    patch_side: int = 16
    layers: int = 12
    heads: int = 12
    width: int = 768
    mlp_width: int = 3072
    classes: int = 1000


SMALL = Config(image_side=32, layers=2, heads=2, width=32, mlp_width=64, classes=10)


def _rename_linear(_mlp: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """The published weights say `linear_1` and `linear_2` for the layers that torchvision now calls 0 and 3."""
    for old, new in (("linear_1", "0"), ("linear_2", "3")):
        for kind in ("weight", "bias"):
            if f"{prefix}{old}.{kind}" in state_dict:
                state_dict[f"{prefix}{new}.{kind}"] = state_dict.pop(f"{prefix}{old}.{kind}")


class EncoderBlock(nn.Module):
    """(batch, tokens, width) -> the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = _norm(config.width)
        self.self_attention = nn.MultiheadAttention(config.width, config.heads, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.ln_2 = _norm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.mlp_width),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(config.mlp_width, config.width),
            nn.Dropout(0.0),
        )
        self.mlp.register_load_state_dict_pre_hook(_rename_linear)  # type: ignore[no-untyped-call]
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.ln_1(tokens)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + tokens
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class Encoder(nn.Module):
    """(batch, tokens, width) -> the same shape, with positions added."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        tokens = (config.image_side // config.patch_side) ** 2 + 1
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, config.width).normal_(std=0.02))
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.Sequential(
            OrderedDict((f"encoder_layer_{i}", EncoderBlock(config)) for i in range(config.layers))
        )
        self.ln = _norm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        encoded: Tensor = self.ln(self.layers(self.dropout(tokens + self.pos_embedding)))
        return encoded


class ViT(nn.Module):
    """(batch, 3, image_side, image_side) -> (batch, classes)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.conv_proj = nn.Conv2d(3, config.width, kernel_size=config.patch_side, stride=config.patch_side)
        self.encoder = Encoder(config)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(config.width, config.classes)))
        # torchvision truncates this at 2, which is 55 standard deviations; trunc_normal_ redraws until the data are in
        # bounds, which fake tensors cannot tell.
        nn.init.normal_(self.conv_proj.weight, std=math.sqrt(1 / (3 * config.patch_side**2)))
        for parameter in (self.conv_proj.bias, *self.heads.parameters()):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv_proj(images).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1)
        scores: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return scores


def training(batch_size: int = 32, optimizer: str = "sgd", small: bool = False) -> Training:
    """ViT-B/16 on 224x224 images and 1000 classes; `small` has two narrow layers and 32x32 images."""
    check_positive(batch_size=batch_size)
    config = SMALL if small else Config()
    model = ViT(config)
    images = torch.randn(batch_size, 3, config.image_side, config.image_side)
    return train_as_model_does(model, (images,), optimizer, small=small, head=model.heads)
