"""AlexNet (Krizhevsky, https://arxiv.org/abs/1404.5997).

Names and shapes are those of torchvision's `alexnet`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkflow.models._recipe import check_positive, train_as_model_does
from checkflow.training import Training


class AlexNet(nn.Module):
    """(batch, 3, height, width), both at least 63 -> (batch, classes)."""

    def __init__(self, channels: tuple[int, int, int, int, int], hidden: int, classes: int) -> None:
        super().__init__()
        first, second, third, fourth, fifth = channels
        self.features = nn.Sequential(
            nn.Conv2d(3, first, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(first, second, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(second, third, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(third, fourth, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(fourth, fifth, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(fifth * 6 * 6, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return scores


def training(batch_size: int = 32, optimizer: str = "sgd", small: bool = False) -> Training:
    """AlexNet on 224x224 images and 1000 classes; `small` has few channels and 64x64 images."""
    check_positive(batch_size=batch_size)
    if small:
        model, side = AlexNet((8, 16, 24, 16, 16), hidden=32, classes=10), 64
    else:
        model, side = AlexNet((64, 192, 384, 256, 256), hidden=4096, classes=1000), 224
    images = torch.randn(batch_size, 3, side, side)
    return train_as_model_does(model, (images,), optimizer, small=small, head=model.classifier[-1])
