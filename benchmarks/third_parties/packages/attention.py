"""Transformers of the lucidrains family: x-transformers, vit-pytorch, perceiver, conformer, local attention, CoLT5."""

from __future__ import annotations

import colt5_attention
import conformer as conformers
import local_attention
import perceiver_pytorch
import torch
import vit_pytorch
import x_transformers
from torch import Tensor, nn
from vit_pytorch.cait import CaiT
from vit_pytorch.nest import NesT
from vit_pytorch.simple_vit import SimpleViT

import checkflow
from third_parties.case import Case, classifier, trained

VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}


def words(model: nn.Module) -> checkflow.Training:
    def loss() -> Tensor:
        ids = torch.randint(64, (2, 17))
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return trained(model, loss)


def features(model: nn.Module, shape: tuple[int, ...]) -> checkflow.Training:
    """Of a model that keeps the shape of what it is given."""
    return trained(model, lambda: model(torch.randn(shape)).square().mean())


def decoder() -> checkflow.Training:
    torch.manual_seed(0)
    layers = x_transformers.Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, attn_dropout=0.1, ff_dropout=0.1)
    return words(x_transformers.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers))


def autoregressive() -> checkflow.Training:
    torch.manual_seed(0)
    layers = x_transformers.Decoder(dim=32, depth=2, heads=4, alibi_pos_bias=True, ff_glu=True)
    net = x_transformers.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)
    model = x_transformers.AutoregressiveWrapper(net)
    return trained(model, lambda: model(torch.randint(64, (2, 17))))


def encoder() -> checkflow.Training:
    torch.manual_seed(0)
    layers = x_transformers.Encoder(dim=32, depth=2, heads=4, use_rmsnorm=True)
    return words(x_transformers.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers))


def vit() -> checkflow.Training:
    torch.manual_seed(0)
    return classifier(vit_pytorch.ViT(**VIT, dropout=0.1, emb_dropout=0.1), 32)


def simple_vit() -> checkflow.Training:
    torch.manual_seed(0)
    return classifier(SimpleViT(**VIT), 32)


def cait() -> checkflow.Training:
    torch.manual_seed(0)
    return classifier(CaiT(**VIT, cls_depth=1, layer_dropout=0.05), 32)


def nest() -> checkflow.Training:
    torch.manual_seed(0)
    net = NesT(image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1), num_classes=10)
    return classifier(net, 32)


def perceiver() -> checkflow.Training:
    torch.manual_seed(0)
    net = perceiver_pytorch.Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=2, max_freq=10.0, depth=2, num_latents=8, latent_dim=16,
        cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=10,
    )  # fmt: skip
    return trained(
        net,
        lambda: nn.functional.cross_entropy(net(torch.randn(2, 8, 8, 3)), torch.randint(10, (2,))),
    )


def conformer() -> checkflow.Training:
    torch.manual_seed(0)
    return features(conformers.Conformer(dim=32, depth=1, dim_head=8, heads=4, conv_kernel_size=7), (2, 16, 32))


def local() -> checkflow.Training:
    torch.manual_seed(0)
    net = local_attention.LocalTransformer(
        num_tokens=64, dim=32, depth=2, heads=4, dim_head=8, max_seq_len=64, local_attn_window_size=8, causal=True
    )
    return trained(net, lambda: net(torch.randint(64, (2, 17)), return_loss=True))


def conditional() -> checkflow.Training:
    torch.manual_seed(0)
    net = colt5_attention.ConditionalRoutedFeedForward(32, light_ff_mult=0.5, heavy_ff_mult=2, num_heavy_tokens=4)
    return features(net, (2, 16, 32))


CASES: tuple[Case, ...] = (
    Case("decoder", decoder),
    Case("autoregressive", autoregressive),
    Case("encoder", encoder),
    Case("vit", vit),
    Case("simple_vit", simple_vit),
    Case("cait", cait),
    Case("nest", nest),
    Case("perceiver", perceiver),
    Case("conformer", conformer),
    Case("local", local),
    Case("colt5", conditional),
)
