"""nn.Transformer with one encoder and one decoder layer of one head (Vaswani et al., https://arxiv.org/abs/1706.03762)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkflow.models._recipe import check_positive, train_as_model_does
from checkflow.training import Training


class Stack(nn.Module):
    """One layer and a norm. A decoder layer also takes the encoder's output: (length, batch, width) each."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, *memory: Tensor) -> Tensor:
        result: Tensor = self.norm(self.layers[0](x, *memory))
        return result


class Transformer(nn.Module):
    """nn.Transformer(width, nhead=1, one layer each), built without deepcopy, which fake tensors do not survive.

    Source (length, batch, width) and target (other length, batch, width) -> the target's shape.
    """

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.encoder = Stack(nn.TransformerEncoderLayer(width, nhead=1, dim_feedforward=mlp_width), width)
        self.decoder = Stack(nn.TransformerDecoderLayer(width, nhead=1, dim_feedforward=mlp_width), width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self.decoder(target, self.encoder(source))
        return result


def training(batch_size: int = 32, optimizer: str = "sgd", small: bool = False) -> Training:
    """Width 512, source of length 10 and target of length 20; `small` has width 32."""
    check_positive(batch_size=batch_size)
    width = 32 if small else 512
    model = Transformer(width, mlp_width=4 * width)
    source, target = torch.randn(10, batch_size, width), torch.randn(20, batch_size, width)
    return train_as_model_does(model, (source, target), optimizer, small=small)
