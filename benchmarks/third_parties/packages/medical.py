"""monai: nets for volumes, with losses of their own."""

from __future__ import annotations

import monai
import torch
from monai.losses import DiceCELoss
from torch import Tensor, nn

import checkflow
from third_parties.case import Case, named, trained


def build(name: str, settings: dict[str, object], size: int) -> checkflow.Training:
    torch.manual_seed(0)
    model: nn.Module = getattr(monai.networks.nets, name)(**settings).train()
    dice = DiceCELoss(to_onehot_y=True, softmax=True)

    def loss() -> Tensor:
        volume = torch.randn(1, 1, size, size, size)
        answer: Tensor = dice(model(volume), torch.randint(2, (1, 1, size, size, size)))
        return answer

    return trained(model, loss)


CASES: tuple[Case, ...] = named(
    build,
    unet=("UNet", {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2),
        "dropout": 0.1}, 16),
    basic_unet=("BasicUNet", {"spatial_dims": 3, "in_channels": 1, "out_channels": 2,
        "features": (4, 4, 8, 8, 8, 4)}, 32),
    unetr=("UNETR", {"in_channels": 1, "out_channels": 2, "img_size": 16, "feature_size": 4, "hidden_size": 32,
        "mlp_dim": 64, "num_heads": 4}, 16),
    seg_resnet=("SegResNet", {"in_channels": 1, "out_channels": 2, "init_filters": 8}, 16),
    attention_unet=("AttentionUnet", {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (4, 8),
        "strides": (2,)}, 16),
)  # fmt: skip
