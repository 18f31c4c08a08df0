"""timm: convolutional nets, transformers and what lies between."""

from __future__ import annotations

import timm
import torch

import checkflow
from third_parties.case import Case, classifier, named


def build(name: str, size: int, settings: dict[str, object]) -> checkflow.Training:
    torch.manual_seed(0)
    return classifier(timm.create_model(name, num_classes=10, **settings).train(), size)


CASES: tuple[Case, ...] = named(
    build,
    resnet10t=("resnet10t", 32, {}),
    mobilenetv3=("mobilenetv3_small_050", 32, {"drop_rate": 0.2}),
    efficientnet_lite=("efficientnet_lite0", 32, {"drop_path_rate": 0.2}),
    regnet=("regnetx_002", 32, {}),
    ghostnet=("ghostnet_050", 32, {}),
    convnext_atto=("convnext_atto", 32, {"drop_path_rate": 0.1}),
    vit_tiny=("vit_tiny_patch16_224", 32, {"img_size": 32, "drop_path_rate": 0.1}),
    deit_tiny=("deit_tiny_patch16_224", 32, {"img_size": 32}),
    swin_tiny=("swin_tiny_patch4_window7_224", 56, {"img_size": 56}),
    mixer=("mixer_s32_224", 224, {}),
    edgenext=("edgenext_xx_small", 64, {}),
    mobilevit=("mobilevit_xxs", 64, {}),
    eva02=("eva02_tiny_patch14_224", 28, {"img_size": 28}),
    nf_regnet=("nf_regnet_b0", 32, {}),
    levit=("levit_128s", 224, {}),
)
