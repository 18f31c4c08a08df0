"""diffusers: denoisers and autoencoders."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiTTransformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from torch import Tensor, nn

import checkflow
from third_parties.case import Case, trained

SMALL = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}


def denoised(model: nn.Module, **more: Tensor) -> checkflow.Training:
    """The noise that was added at a random moment."""
    noises = DDPMScheduler(num_train_timesteps=100)

    def loss() -> Tensor:
        images, noise, moments = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16), torch.randint(100, (2,))
        return nn.functional.mse_loss(model(noises.add_noise(images, noise, moments), moments, **more).sample, noise)

    return trained(model, loss)


def unet() -> checkflow.Training:
    torch.manual_seed(0)
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return denoised(
        UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, attention_head_dim=8, **SMALL)
    )


def conditional() -> checkflow.Training:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16, in_channels=3, out_channels=3, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, attention_head_dim=4, **SMALL,
    )  # fmt: skip
    return denoised(model, encoder_hidden_states=torch.randn(2, 5, 8))


def transformer() -> checkflow.Training:
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=16, patch_size=4,
        num_embeds_ada_norm=100, norm_num_groups=8,
    )  # fmt: skip

    def loss() -> Tensor:
        images, moments, labels = torch.randn(2, 3, 16, 16), torch.randint(100, (2,)), torch.randint(100, (2,))
        answer: Tensor = model(images, moments, class_labels=labels).sample.square().mean()
        return answer

    return trained(model, loss)


def autoencoder() -> checkflow.Training:
    torch.manual_seed(0)
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    model = AutoencoderKL(down_block_types=down, up_block_types=up, latent_channels=4, sample_size=16, **SMALL)

    def loss() -> Tensor:
        images = torch.randn(2, 3, 16, 16)
        latent = model.encode(images).latent_dist
        rebuilt = model.decode(latent.sample()).sample
        answer: Tensor = nn.functional.mse_loss(rebuilt, images) + 1e-3 * latent.kl().mean()
        return answer

    return trained(model, loss)


def quantized() -> checkflow.Training:
    torch.manual_seed(0)
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    model = VQModel(down_block_types=down, up_block_types=up, num_vq_embeddings=16, latent_channels=4, **SMALL)

    def loss() -> Tensor:
        images = torch.randn(2, 3, 16, 16)
        rebuilt = model(images)
        answer: Tensor = nn.functional.mse_loss(rebuilt.sample, images) + rebuilt.commit_loss
        return answer

    return trained(model, loss)


CASES: tuple[Case, ...] = (
    Case("unet", unet),
    Case("unet_conditional", conditional),
    Case("dit", transformer),
    Case("autoencoder_kl", autoencoder),
    Case("vq_model", quantized),
)
