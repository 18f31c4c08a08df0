"""The loops: where they are, what they need, what of theirs has to be the same in the end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROUND = 10  # iterations from one evaluation to the next, in each of them
FOLDER = Path(__file__).parent.parent / "public_loops"


@dataclass(frozen=True, slots=True)
class Loop:
    """`arguments` of (folder of the data, iterations, a multiple of ROUND); `kept`: paths from a script's variables."""

    name: str
    arguments: Callable[[Path, int], list[str]]
    kept: tuple[str, ...]
    packages: tuple[str, ...] = ()

    @property
    def plain(self) -> Path:
        return FOLDER / f"{self.name}.py"

    @property
    def attached(self) -> Path:
        return FOLDER / f"{self.name}_attached.py"

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)


def _nanogpt(data: Path, iterations: int) -> list[str]:
    return [
        f"--data_dir={data}",
        f"--max_iters={iterations - 1}",
        f"--lr_decay_iters={iterations}",
    ]  # it makes one more


def _transformers(data: Path, iterations: int) -> list[str]:
    return [
        *("--train_file", str(data / "train.txt"), "--validation_file", str(data / "val.txt"), "--output_dir", "out"),
        *("--max_steps", str(iterations), "--do_train", "--do_eval", "--eval_strategy", "steps", "--eval_steps", "10"),
        *("--logging_steps", "5", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"),
        *("--learning_rate", "1e-3", "--warmup_steps", "5", "--use_cpu", "--report_to", "none"),
    ]


def _accelerate(data: Path, iterations: int) -> list[str]:
    files = ("--train_file", str(data / "train.jsonl"), "--validation_file", str(data / "val.jsonl"))
    return [*files, "--num_train_epochs", str(iterations // 10)]


def _diffusers(data: Path, iterations: int) -> list[str]:
    return ["--train_data", str(data / "images.npy"), "--num_epochs", str(iterations // 10)]


def _fabric(data: Path, iterations: int) -> list[str]:
    return ["--data_dir", str(data), "--max_steps", str(iterations)]


LOOPS = (
    Loop("nanogpt", _nanogpt, ("model", "optimizer", "scaler", "iter_num", "best_val_loss", "X", "Y")),
    Loop(
        "transformers_clm",
        _transformers,
        tuple(f"trainer.{name}" for name in ("model", "optimizer", "lr_scheduler", "state.log_history", "state.epoch")),
        ("transformers", "accelerate"),
    ),
    Loop(
        "accelerate_glue",
        _accelerate,
        ("model", "optimizer", "lr_scheduler", "completed_steps", "eval_metric"),
        ("transformers", "accelerate"),
    ),
    Loop(
        "diffusers_unconditional",
        _diffusers,
        ("model", "optimizer", "lr_scheduler", "ema_model", "global_step"),
        ("diffusers", "accelerate"),
    ),
    Loop(
        "fabric_pretrain", _fabric, ("model", "optimizer", "train_dataloader", "state"), ("lightning", "torchdata")
    ),
)  # fmt: skip
