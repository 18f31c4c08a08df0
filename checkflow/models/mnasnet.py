"""MNASNet with depth multiplier 0.5 (Tan et al., https://arxiv.org/abs/1807.11626).

Names and shapes are those of torchvision's `mnasnet0_5`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkflow.models._recipe import check_positive, train_as_model_does
from checkflow.training import Training

# Channels of the stem, of its separable convolution, and of the six stacks, at depth multiplier 0.5.
CHANNELS = (16, 8, 16, 24, 40, 48, 96, 160)
SMALL_CHANNELS = (8, 4, 8, 8, 8, 16, 16, 16)
# Kernel size, stride, expansion factor and number of blocks of each stack.
STACKS = ((3, 2, 3, 3), (5, 2, 3, 3), (5, 2, 6, 3), (3, 1, 6, 2), (5, 2, 6, 4), (3, 1, 6, 1))
LAST_CHANNELS = 1280


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, momentum=1 - 0.9997)  # the paper's TensorFlow decay, as PyTorch's momentum


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project: (batch, inputs, h, w) -> (batch, outputs, h / stride, w / stride)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        middle = inputs * expansion
        self.apply_residual = inputs == outputs and stride == 1
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, middle, 1, bias=False),
            _norm(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, kernel, padding=kernel // 2, stride=stride, groups=middle, bias=False),
            _norm(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, outputs, 1, bias=False),
            _norm(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + x if self.apply_residual else out


class MNASNet(nn.Module):
    """(batch, 3, height, width) -> (batch, classes)."""

    def __init__(self, channels: tuple[int, ...], last: int, classes: int) -> None:
        super().__init__()
        stem, separable, *stacks = channels
        layers: list[nn.Module] = [
            nn.Conv2d(3, stem, 3, padding=1, stride=2, bias=False),
            _norm(stem),
            nn.ReLU(inplace=True),
            nn.Conv2d(stem, stem, 3, padding=1, stride=1, groups=stem, bias=False),
            _norm(stem),
            nn.ReLU(inplace=True),
            nn.Conv2d(stem, separable, 1, padding=0, stride=1, bias=False),
            _norm(separable),
        ]
        previous = separable
        for outputs, (kernel, stride, expansion, blocks) in zip(stacks, STACKS, strict=True):
            first = InvertedResidual(previous, outputs, kernel, stride, expansion)
            others = [InvertedResidual(outputs, outputs, kernel, 1, expansion) for _ in range(blocks - 1)]
            layers.append(nn.Sequential(first, *others))
            previous = outputs
        layers += [nn.Conv2d(previous, last, 1, padding=0, stride=1, bias=False), _norm(last), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(p=0.2, inplace=True), nn.Linear(last, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_uniform_(module.weight, mode="fan_out", nonlinearity="sigmoid")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.layers(images).mean([2, 3]))
        return scores


def training(batch_size: int = 32, optimizer: str = "sgd", small: bool = False) -> Training:
    """MNASNet 0.5 on 224x224 images and 1000 classes; `small` has few channels and 64x64 images."""
    check_positive(batch_size=batch_size)
    model = MNASNet(SMALL_CHANNELS, last=32, classes=10) if small else MNASNet(CHANNELS, LAST_CHANNELS, classes=1000)
    side = 64 if small else 224
    # No head for Muon to leave out: the classifier's is the only 2-D weight there is.
    return train_as_model_does(model, (torch.randn(batch_size, 3, side, side),), optimizer, small=small)
