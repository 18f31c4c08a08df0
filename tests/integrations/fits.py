"""A training with Lightning's Trainer, in processes that are killed once so many steps are done, and resumed."""

# ruff: noqa: ARG002 (hooks are called with all of these)
from __future__ import annotations

import hashlib
import importlib
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lives
import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import checkflow
from checkflow.integrations.lightning import CheckflowCallback

pl: Any = importlib.import_module(os.environ.get("FITS_NAMESPACE", "lightning.pytorch"))

callbacks: Any = importlib.import_module(f"{pl.__name__}.callbacks")

ITEMS, BATCH, ACCUMULATED, EPOCHS, WIDTH = 22, 2, 2, 3, 6  # 11 batches, 6 steps an epoch, of which the last has 1 batch
Data = torch.utils.data.TensorDataset


def data(items: int = ITEMS, seed: int = 1) -> Data:
    return Data(torch.randn(items, WIDTH, generator=torch.Generator().manual_seed(seed)), torch.arange(items))


class Stream(torch.utils.data.IterableDataset[Any]):
    """Of a length that nobody knows: knows its position, and draws for each item."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        items = data()
        while self.next < ITEMS:
            self.next += 1
            x, number = items[self.next - 1]
            yield x + 0.01 * torch.rand(WIDTH), number
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


def streamed() -> Any:
    return StatefulDataLoader(Stream(), batch_size=BATCH)


def paired() -> Any:
    """A second loader, which is through its data twice while the first is once."""
    return [resumable(), checkflow.ResumableLoader(data(10, 5), batch_size=BATCH, shuffle=True)]


def stateful() -> Any:
    return StatefulDataLoader(data(), batch_size=BATCH, shuffle=True)


def generated() -> Any:
    return StatefulDataLoader(data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def resumable() -> Any:
    return checkflow.ResumableLoader(data(), batch_size=BATCH, shuffle=True, seed=3)


def distributed() -> Any:
    sampler = StatefulDistributedSampler(data(), 2, int(os.environ["RANK"]))
    return StatefulDataLoader(data(), batch_size=BATCH, sampler=sampler)


def divided() -> Any:
    """Each rank has data of its own."""
    return checkflow.ResumableLoader(
        torch.utils.data.Subset(data(), range(int(os.environ["RANK"]), ITEMS, 2)), batch_size=BATCH, shuffle=True
    )


LOADERS: dict[str, Callable[[], Any]] = {
    "stateful": stateful,
    "generated": generated,
    "resumable": resumable,
    "distributed": distributed,
    "divided": divided,
    "streamed": streamed,
    "paired": paired,
}


class Net(pl.LightningModule):  # type: ignore[misc]
    """Draws in its steps, logs for steps and epochs, and has a schedule for steps and one for what is validated."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, WIDTH))
        self.lr = 0.01
        self.register_buffer("seen", torch.zeros(()))  # the first rank's becomes everybody's, as DDP does that

    def training_step(self, batch: Any, index: int) -> Any:
        x, numbers = map(torch.cat, zip(*batch, strict=True)) if isinstance(batch[0], list) else batch
        self.seen += x.mean()
        if any(isinstance(one, Kill) for one in self.trainer.callbacks):  # else a learning rate is looked for
            with (self.folder / "order").open("a") as file:
                file.write(f"{self.trainer.global_step + 1} {self.current_epoch} {index} {numbers.tolist()}\n")
        loss = (self.layers(x) - x).square().mean() + 0.01 * random.random() * np.random.random()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validated", (self.layers(batch[0]) - batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validated"}}


class Manual(Net):
    """Two optimizers, stepped by hand, one of them every other time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        first.step()
        if index % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        parts = self.layers[0], self.layers[3]
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]


class Sharded(Net):
    """Divided among the ranks by FSDP2."""

    def configure_model(self) -> None:
        for layer in (self.layers[0], self.layers[3], self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Counting(Net):
    """Logs what a metric counts in an epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mean = torchmetrics.MeanMetric()

    def on_train_start(self) -> None:
        self.mean.reset()  # of what was validated before training

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


MODULES: dict[str, Callable[[Path], Any]] = {"manual": Manual, "sharded": Sharded, "counting": Counting}


def before(kind: str) -> list[Any]:
    """Callbacks that come before the others."""
    kinds: dict[str, Callable[[], Any]] = {
        "averaged": lambda: callbacks.EMAWeightAveraging(decay=0.9),
        "stochastic": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2),
        "stopped": lambda: callbacks.EarlyStopping("validated", mode="max", stopping_threshold=-1.0),  # at once
        "growing": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 3}),
        "found": lambda: callbacks.LearningRateFinder(num_training_steps=30, min_lr=1e-4),
    }
    return [kinds[kind]()] if kind in kinds else []


def in_ranks(kind: str) -> dict[str, Any]:
    """What Trainer is given beside, of several processes."""
    if kind != "sharded":
        return {"strategy": "ddp", "devices": 2}
    strategies = importlib.import_module(f"{pl.__name__}.strategies")
    return {"strategy": strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), "devices": 2}


class Kill(pl.Callback):  # type: ignore[misc]
    """And a history of all that is logged."""

    def __init__(self, when: str, step: int) -> None:
        self.when = when
        self.step = step
        self.history: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])

    def reached(self, when: str, trainer: Any) -> None:
        if self.when == when and trainer.global_step >= self.step:
            if when == "raise":
                raise RuntimeError("as asked")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Any, *given: Any) -> None:
        self.reached("batch", trainer)
        self.reached("raise", trainer)

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        self.history.append({name: float(value) for name, value in trainer.logged_metrics.items()})
        self.reached("ended", trainer)

    def on_validation_batch_start(self, trainer: Any, *given: Any) -> None:
        if not trainer.sanity_checking:
            self.reached("validation", trainer)

    def on_validation_end(self, trainer: Any, *given: Any) -> None:
        if not trainer.sanity_checking:
            self.history.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, *given: Any) -> None:
        self.history.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.reached("epoch", trainer)

    def on_train_epoch_start(self, trainer: Any, *given: Any) -> None:
        self.reached("next", trainer)
        loaders = trainer.train_dataloader if isinstance(trainer.train_dataloader, list) else [trainer.train_dataloader]
        for loader in loaders if self.when == "plain" else ():  # by hand
            if isinstance(loader, checkflow.ResumableLoader):
                loader.set_epoch(trainer.current_epoch)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fit(folder: Path, kind: str, when: str, step: int) -> dict[str, object]:
    """All that the training leaves."""
    warnings.simplefilter("ignore")
    pl.seed_everything(3, verbose=False)
    module = MODULES.get(kind, Net)(folder)
    kill = Kill(when, step)
    options = {"when_full": "wait"} if lives.in_ranks() else {}
    checkpoints = [] if when == "plain" else [CheckflowCallback(lives.store(folder), **options)]
    trainer = pl.Trainer(
        max_epochs=-1 if kind == "steps" else EPOCHS, max_steps=16 if kind == "steps" else -1,
        accumulate_grad_batches=1 if kind in ("manual", "growing") else ACCUMULATED,
        val_check_interval=4, callbacks=[*before(kind), *checkpoints, kill], enable_checkpointing=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", log_every_n_steps=1,
        default_root_dir=folder, **(in_ranks(kind) if lives.in_ranks() else {}),
    )  # fmt: skip
    validation = torch.utils.data.DataLoader(data(6, 2), batch_size=2)
    trainer.fit(module, LOADERS.get(kind, stateful)(), validation)
    content = hashlib.sha256()
    for optimizer in trainer.optimizers:
        for slots in optimizer.state_dict()["state"].values():
            for _, tensor in sorted(slots.items()):
                content.update(local(tensor).numpy().tobytes())
    for tensor in module.state_dict().values():
        content.update(local(tensor).numpy().tobytes())
    drawn = [random.random(), np.random.random(), torch.rand(1).item()]
    return {
        "tensors": content.hexdigest(),
        "groups": [str({**group, "params": 0}) for one in trainer.optimizers for group in one.param_groups],
        "schedulers": [str(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "history": kill.history,
        "drawn": drawn,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx],
        "loops": {k: v for k, v in trainer.fit_loop.state_dict().items() if "combined_loader" not in str(v)},
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    lives.main(fit)
