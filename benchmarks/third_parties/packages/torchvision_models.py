"""torchvision, segmentation_models_pytorch, efficientnet_pytorch: the usual nets for images."""

from __future__ import annotations

import efficientnet_pytorch
import segmentation_models_pytorch as segmentation
import torch
import torchvision
from torch import Tensor

import checkflow
from third_parties.case import Case, classifier, named, trained


def build(name: str, size: int) -> checkflow.Training:
    torch.manual_seed(0)
    return classifier(torchvision.models.get_model(name, weights=None, num_classes=10).train(), size)


def masks(name: str) -> checkflow.Training:
    torch.manual_seed(0)
    model = segmentation.create_model(name, encoder_name="resnet18", encoder_weights=None, classes=2).train()
    dice = segmentation.losses.DiceLoss("multiclass")

    def loss() -> Tensor:
        answer: Tensor = dice(model(torch.randn(2, 3, 32, 32)), torch.randint(2, (2, 32, 32)))
        return answer

    return trained(model, loss)


def efficientnet() -> checkflow.Training:
    torch.manual_seed(0)
    net = efficientnet_pytorch.EfficientNet.from_name("efficientnet-b0", num_classes=10, image_size=32)
    return classifier(net.train(), 32)


CASES: tuple[Case, ...] = (
    *named(
        build,
        resnet18=("resnet18", 32),
        densenet121=("densenet121", 32),
        squeezenet=("squeezenet1_1", 64),
        shufflenet=("shufflenet_v2_x0_5", 32),
        mobilenet_v2=("mobilenet_v2", 32),
        mnasnet=("mnasnet0_5", 32),
        swin_v2=("swin_v2_t", 32),
    ),
    *named(masks, unet=("unet",), fpn=("fpn",), deeplab=("deeplabv3plus",), linknet=("linknet",)),
    Case("efficientnet_pytorch", efficientnet),
)
