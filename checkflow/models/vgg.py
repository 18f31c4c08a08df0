"""VGG-11 (Simonyan and Zisserman, https://arxiv.org/abs/1409.1556).

Names and shapes are those of torchvision's `vgg11`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkflow.models._recipe import check_positive, train_as_model_does
from checkflow.training import Training


class VGG11(nn.Module):
    """(batch, 3, height, width), both at least 32 -> (batch, classes)."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        previous = 3
        for stage in ((1,), (2,), (4, 4), (8, 8), (8, 8)):
            for multiple in stage:
                layers += [nn.Conv2d(previous, multiple * width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
                previous = multiple * width
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(previous * 7 * 7, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return scores


def training(batch_size: int = 32, optimizer: str = "sgd", small: bool = False) -> Training:
    """VGG-11 on 224x224 images and 1000 classes; `small` has few channels and 32x32 images."""
    check_positive(batch_size=batch_size)
    model = VGG11(width=4, hidden=32, classes=10) if small else VGG11(width=64, hidden=4096, classes=1000)
    side = 32 if small else 224
    images = torch.randn(batch_size, 3, side, side)
    return train_as_model_does(model, (images,), optimizer, small=small, head=model.classifier[-1])
