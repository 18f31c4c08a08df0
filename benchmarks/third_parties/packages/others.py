"""What is built otherwise: spikes, differential equations, Gaussian processes, codebooks, adapters, two networks."""

from __future__ import annotations

import ema_pytorch
import gpytorch
import kornia
import peft
import snntorch
import torch
import torchdiffeq
import transformers
import vector_quantize_pytorch
from snntorch import utils
from torch import Tensor, nn

import checkflow
from third_parties.case import Case, named, trained


def spikes() -> checkflow.Training:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), snntorch.Leaky(beta=0.9, init_hidden=True), nn.Linear(32, 10),
        snntorch.Leaky(beta=0.9, init_hidden=True, output=True),
    )  # fmt: skip

    def loss() -> Tensor:
        utils.reset(model)
        total = torch.zeros(4, 10)
        for _ in range(5):
            total = total + model(torch.rand(4, 16))[1]
        return nn.functional.cross_entropy(total, torch.randint(10, (4,)))

    return trained(model, loss)


class Slope(nn.Module):
    """dy/dt."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, _: Tensor, y: Tensor) -> Tensor:
        answer: Tensor = self.net(y)
        return answer


def equation(method: str, adjoint: bool) -> checkflow.Training:
    torch.manual_seed(0)
    model = Slope()
    solve = torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint
    times = torch.linspace(0.0, 1.0, 5)
    return trained(model, lambda: solve(model, torch.randn(3, 4), times, method=method)[-1].square().mean())


class Process(gpytorch.models.ExactGP):  # type: ignore[misc]
    """With a radial kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: nn.Module) -> None:
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> object:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def gaussian() -> checkflow.Training:
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 20)
    y = torch.sin(6 * x) + 0.1 * torch.randn(20)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(x, y, likelihood).train()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return trained(model, lambda: -evidence(model(x), y))


def codebook(ema: bool) -> checkflow.Training:
    torch.manual_seed(0)
    quantizer = vector_quantize_pytorch.VectorQuantize(
        dim=16, codebook_size=32, ema_update=ema, learnable_codebook=not ema, decay=0.9
    )
    model = nn.ModuleDict({"encoder": nn.Linear(8, 16), "quantizer": quantizer, "decoder": nn.Linear(16, 8)}).train()

    def loss() -> Tensor:
        x = torch.randn(2, 6, 8)
        quantized, _, commitment = model["quantizer"](model["encoder"](x))
        answer: Tensor = nn.functional.mse_loss(model["decoder"](quantized), x) + commitment.sum()
        return answer

    return trained(model, loss)


def scalar_quantizer() -> checkflow.Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), vector_quantize_pytorch.FSQ(levels=[8, 5, 5, 5]))
    last = nn.Linear(4, 8)
    both = nn.ModuleList((model, last))

    def loss() -> Tensor:
        x = torch.randn(2, 6, 8)
        return nn.functional.mse_loss(last(model(x)[0]), x)

    return trained(both, loss)


def adapter(kind: str) -> checkflow.Training:
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    )
    targets = ["q_proj", "v_proj"]
    config = {
        "lora": peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1),
        "dora": peft.LoraConfig(r=4, target_modules=targets, use_dora=True),
        "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    }[kind]
    model = peft.get_peft_model(base, config)

    def loss() -> Tensor:
        ids = torch.randint(128, (2, 12))
        answer: Tensor = model(input_ids=ids, labels=ids).loss
        return answer

    some = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return trained(model, loss, torch.optim.AdamW(some, lr=1e-3))


def augmented() -> checkflow.Training:
    torch.manual_seed(0)
    augment = kornia.augmentation.AugmentationSequential(
        kornia.augmentation.RandomHorizontalFlip(p=0.5), kornia.augmentation.RandomGaussianNoise(p=0.5)
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))

    def loss() -> Tensor:
        images = augment(torch.rand(2, 3, 8, 8))
        labels = torch.randint(10, (2,))
        answer: Tensor = kornia.losses.focal_loss(model(images), labels, alpha=0.5, gamma=2.0, reduction="mean")
        return answer

    return trained(model, loss)


def averaged() -> checkflow.Training:
    """The average is one of the models that are listed, so that it is state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    average = ema_pytorch.EMA(model, beta=0.9, update_every=1, update_after_step=0, include_online_model=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def iteration() -> None:
        torch.autograd.backward(model(torch.randn(8, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        average.update()

    return checkflow.Training((model, average), optimizer, iteration)


def adversaries() -> checkflow.Training:
    """Two networks with equal names, two optimizers."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    binary = nn.functional.binary_cross_entropy_with_logits

    def iteration() -> None:
        made, real = generator(torch.randn(8, 4)), torch.randn(8, 8)
        judges.zero_grad()
        said, true = discriminator(made.detach()), discriminator(real)
        torch.autograd.backward(binary(said, torch.zeros(8, 1)) + binary(true, torch.ones(8, 1)))
        judges.step()
        makes.zero_grad()
        torch.autograd.backward(binary(discriminator(made), torch.ones(8, 1)))
        makes.step()

    return checkflow.Training((generator, discriminator), (makes, judges), iteration)


CASES: tuple[Case, ...] = (
    Case("spikes", spikes),
    *named(equation, ode_rk4=("rk4", False), ode_dopri5=("dopri5", False), ode_adjoint=("rk4", True)),
    Case("gaussian_process", gaussian),
    *named(codebook, codebook_ema=(True,), codebook_learned=(False,)),
    Case("scalar_quantizer", scalar_quantizer),
    *named(adapter, lora=("lora",), dora=("dora",), ia3=("ia3",)),
    Case("augmented", augmented),
    Case("averaged", averaged),
    Case("adversaries", adversaries),
)
