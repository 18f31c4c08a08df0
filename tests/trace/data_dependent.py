"""Small trainings whose iteration needs values, which fake tensors do not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from trainings import Factory, batch, classify, loop, mlp

from checkflow import Training

DATA_DEPENDENT: dict[str, Factory] = {}


def data_dependent(factory: Factory) -> Factory:
    """Register a training whose iteration needs values."""
    DATA_DEPENDENT[factory.__name__] = factory
    return factory


@data_dependent
def grad_scaler() -> Training:
    model, (x, y), scaler = mlp(), batch(), torch.amp.GradScaler("cpu")
    sgd = optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def iteration() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()

    return Training(model, sgd, iteration)


@data_dependent
def loss_logged() -> Training:
    model, (x, y) = mlp(), batch()
    log: list[float] = []

    def loss() -> Tensor:
        value = F.cross_entropy(model(x), y)
        log.append(value.item())
        return value

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@data_dependent
def running_loss_logged() -> Training:
    model, (x, y), total = mlp(), batch(), torch.zeros(())
    log: list[float] = []

    def loss() -> Tensor:
        value = F.cross_entropy(model(x), y)
        total.add_(value.detach())
        log.append(total.item())
        return value

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@data_dependent
def masked_by_the_model() -> Training:
    model, (x, y) = mlp(), batch()

    def loss() -> Tensor:
        logits = model(x)
        rows = (logits[:, 0] > -100).nonzero().flatten()
        return F.cross_entropy(logits[rows], y[rows])

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@data_dependent
def adafactor_large() -> Training:
    model = nn.Sequential(nn.Linear(4, 70_000), nn.ReLU(), nn.Linear(70_000, 3))  # larger than what is known of values
    return classify(model, optim.Adafactor(model.parameters()))


@data_dependent
def loader_inside() -> Training:
    model, (x, y) = mlp(), batch()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)
    sgd = optim.SGD(model.parameters(), 0.1)

    def iteration() -> None:
        for some_x, some_y in loader:
            torch.autograd.backward(F.cross_entropy(model(some_x), some_y))
            sgd.step()
            sgd.zero_grad()

    return Training(model, sgd, iteration)
