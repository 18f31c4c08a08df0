"""ResNet-3D-18 (Tran et al., https://arxiv.org/abs/1711.11248).

Names and shapes are those of torchvision's `r3d_18`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkflow.models._recipe import check_positive, train_as_model_does
from checkflow.training import Training


class BasicBlock(nn.Module):
    """Two 3x3x3 convolutions and a shortcut: (batch, inputs, t, h, w) -> (batch, outputs, t, h, w), each / stride."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(
            nn.Conv3d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm3d(outputs),
            nn.ReLU(inplace=True),
        )
        self.conv2 = nn.Sequential(
            nn.Conv3d(outputs, outputs, kernel_size=3, padding=1, bias=False), nn.BatchNorm3d(outputs)
        )
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv3d(inputs, outputs, kernel_size=1, stride=stride, bias=False), nn.BatchNorm3d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.conv1(x))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class ResNet3D18(nn.Module):
    """(batch, 3, frames, height, width) -> (batch, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, width, kernel_size=(3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(inplace=True),
        )
        self.layer1 = _stage(width, width, stride=1)
        self.layer2 = _stage(width, 2 * width, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, stride=2)
        self.layer4 = _stage(4 * width, 8 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv3d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, clips: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(clips)))))
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, stride=1))


def training(batch_size: int = 32, optimizer: str = "sgd", small: bool = False) -> Training:
    """ResNet-3D-18 on one 112x112 frame and 400 classes; `small` has few channels and a 32x32 frame."""
    check_positive(batch_size=batch_size)
    model = ResNet3D18(width=4, classes=10) if small else ResNet3D18(width=64, classes=400)
    side = 32 if small else 112
    # No head for Muon to leave out: `fc` is the only 2-D weight there is.
    return train_as_model_does(model, (torch.randn(batch_size, 3, 1, side, side),), optimizer, small=small)
