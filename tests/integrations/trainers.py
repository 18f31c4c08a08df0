"""A training with Hugging Face's Trainer, in processes that are killed once so many steps are done, and resumed."""

# ruff: noqa: ARG002 (callbacks are called with all of these)
from __future__ import annotations

import hashlib
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lives
import numpy as np
import torch
import transformers

from checkflow.integrations.transformers import CheckflowCallback, resumable

ITEMS, BATCH, ACCUMULATED, EPOCHS = 40, 2, 3, 3  # 7 steps an epoch, of which the last has 2 batches
UNTIMED = ("runtime", "per_second")


class Counted(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Says which items were loaded, in order."""

    def __init__(self, items: int = ITEMS) -> None:
        self.tokens = torch.randint(64, (items, 8), generator=torch.Generator().manual_seed(1))
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.loaded.append(index)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def counting(model: torch.nn.Module) -> torch.nn.Module:
    """With a buffer that each pass writes, of an evaluation, too."""
    model.register_buffer("seen", torch.zeros(()))

    def count(module: Any, _args: object, given: dict[str, Any]) -> None:
        module.seen += given["input_ids"].float().mean()

    model.register_forward_pre_hook(count, with_kwargs=True)
    return model


class Kill(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, when: str, step: int) -> None:
        self.when = when
        self.step = step

    def _reached(self, when: str, state: Any) -> None:
        if self.when == when and state.global_step >= self.step:
            if when == "raise":
                raise RuntimeError("as asked")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._reached("step", state)
        self._reached("raise", state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._reached("substep", state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._reached("evaluate", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._reached("epoch", state)


class Patience(transformers.trainer_callback.ExportableState, transformers.TrainerCallback):  # type: ignore[misc]
    """A callback whose state is exported."""

    def __init__(self) -> None:
        self.evaluated = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.evaluated += 1

    def state(self) -> dict[str, object]:
        return {"args": {}, "attributes": {"evaluated": self.evaluated}}


class Watched(transformers.Trainer):  # type: ignore[misc]
    """Notes what it trains on."""

    def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        with (Path(self.args.output_dir) / "order").open("a") as file:
            file.write(f"{self.state.global_step + 1} {inputs['input_ids'][:, :3].tolist()}\n")
        return super().training_step(model, inputs, *given, **named)


def make(folder: Path, when: str = "never", step: int = 0, **options: Any) -> Any:
    """`arguments`, `data`, `collate` and `callbacks` are for Trainer, a `kind`; the rest is for checkflow."""
    given = {"items": ITEMS, **options.pop("arguments", {})}
    kind, callbacks, collate = options.pop("kind", Watched), options.pop("callbacks", ()), options.pop("collate", None)
    data = options.pop("data", None) or Counted(given.pop("items"))
    given.pop("items", None)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    folder.mkdir(parents=True, exist_ok=True)
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATED,
        "num_train_epochs": EPOCHS, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 5,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "include_num_input_tokens_seen": "all", "metric_for_best_model": "loss", "seed": 3,
    }  # fmt: skip
    plain = when == "plain"
    if lives.in_ranks():
        arguments |= {"ddp_backend": "gloo", "data_seed": 3, "seed": 3 + int(os.environ["RANK"])}
        options |= {"when_full": "wait"}
    checkpoints = [] if plain else [CheckflowCallback(lives.store(folder), **options)]
    trainer = (kind if plain else resumable(kind))(
        counting(transformers.GPT2LMHeadModel(config)),
        transformers.TrainingArguments(**(arguments | given)),
        train_dataset=data,
        eval_dataset=Counted(6),
        data_collator=collate,
        callbacks=[*checkpoints, *callbacks, Patience(), Kill(when, step)],
    )
    trainer.resumes = not plain
    return trainer


def final(trainer: Any) -> dict[str, object]:
    """All that the training leaves, but for times."""
    content = hashlib.sha256()
    optimizer = trainer.optimizer.state_dict()
    slots = [value for _, state in sorted(optimizer["state"].items()) for _, value in sorted(state.items())]
    for tensor in (*trainer.model.state_dict().values(), *slots):
        content.update(tensor.detach().contiguous().numpy().tobytes())
    history = [
        {name: value for name, value in line.items() if not any(part in name for part in UNTIMED)}
        for line in trainer.state.log_history
    ]
    generators = [
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    ]
    patience = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Patience))
    state = trainer.state
    return {
        "tensors": content.hexdigest(),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]],
        "scheduler": trainer.lr_scheduler.state_dict(),
        "history": history,
        "generators": hashlib.sha256(repr(generators).encode()).hexdigest(),
        "state": [state.global_step, state.epoch, state.best_metric, state.best_global_step, state.total_flos,
                  state.num_input_tokens_seen],
        "evaluated": patience.evaluated,
    }  # fmt: skip


def train(folder: Path, _kind: str, when: str, step: int, **options: Any) -> dict[str, object]:
    trainer = make(folder, when, step, **options)
    trainer.train(resume_from_checkpoint=True if trainer.resumes else None)
    return {"final": final(trainer), "loaded": trainer.train_dataset.loaded}


def life(folder: Path, when: str, step: int, **options: Any) -> None:
    lives.life(folder, "hf", when, step, partial(train, **options))


if __name__ == "__main__":
    torch.set_num_threads(1)
    lives.main(train)
