"""The training of trainers.py on data whose order takes more than the number of steps to go on with."""

# ruff: noqa: ARG002 (callbacks are called with all of these)
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lives
import numpy as np
import torch
import trainers
import transformers


class Uneven(trainers.Counted):
    """Of items of several lengths."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: tokens[: 3 + index % 6].tolist() for name, tokens in super().__getitem__(index).items()}


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    length = max(len(item["input_ids"]) for item in items)
    filled = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor([[*item[name], *[fill] * (length - len(item[name]))] for item in items])
        for name, fill in filled.items()
    }


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Has no length. A pass is 6 steps and two batches, whose gradients go into the next pass's first step."""

    def __init__(self) -> None:
        self.items = trainers.Counted()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.items[index] for index in range(len(self.items)))


class Weighted(trainers.Watched):
    def _get_train_sampler(self, *_given: Any) -> Any:
        items = len(self.train_dataset)
        return torch.utils.data.WeightedRandomSampler([1.0 + index % 3 for index in range(items)], items)


class Owned(trainers.Watched):
    """Its loader is its own, and draws from a generator of its own."""

    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        return torch.utils.data.DataLoader(self.train_dataset, trainers.BATCH, shuffle=True, generator=generator)


class Unseen(torch.utils.data.Sampler[int]):
    """Draws from what nobody finds."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.random = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(self.items).tolist())

    def __len__(self) -> int:
        return self.items


class Hidden(trainers.Watched):
    def _get_train_sampler(self, *_given: Any) -> Any:
        return Unseen(len(self.train_dataset))


class Cut(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the first pass early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_epoch_stop = state.global_step == 3


def options(kind: str) -> dict[str, Any]:
    epochs = {"num_train_epochs": 2, "logging_steps": 1}
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    kinds: dict[str, dict[str, Any]] = {
        "grouped": {
            "data": Uneven(), "collate": padded, "arguments": epochs | {"train_sampling_strategy": "group_by_length"},
        },
        "unseeded": {"arguments": epochs | {"accelerator_config": {"use_seedable_sampler": False}}},
        "owned": {"kind": Owned, "arguments": epochs},
        "hidden": {"kind": Hidden, "arguments": epochs},
        "dispatched": {"arguments": epochs | {"accelerator_config": {"dispatch_batches": True}}},
        "stream": {"data": Stream(), "arguments": epochs | {"max_steps": 14}},
        "persistent": {"kind": Weighted, "arguments": epochs | workers},
        "cut": {"callbacks": [Cut()], "arguments": epochs},
    }  # fmt: skip
    return kinds[kind]


def train(folder: Path, kind: str, when: str, step: int) -> dict[str, object]:
    trainer = trainers.make(folder, when, step, **options(kind))
    trainer.train(resume_from_checkpoint=True if trainer.resumes else None)
    return {"final": trainers.final(trainer)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    lives.main(train)
