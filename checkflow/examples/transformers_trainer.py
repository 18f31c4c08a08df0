"""Hugging Face's Trainer, which survives being killed at any moment.

    python -m checkflow.examples.transformers_trainer --store checkpoints

Run it again after a kill: it goes on where it was. A small GPT-2 learns to count.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from checkflow.integrations.transformers import CheckflowCallback, resumable

VOCABULARY, LENGTH = 64, 16


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class StopAfter(TrainerCallback):  # type: ignore[misc]
    """kill -9, as a machine that is taken away would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        if state.global_step == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="directory of the checkpoints")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="be killed then")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **ends)
    )
    callbacks = [CheckflowCallback(chosen.store)]
    if chosen.stop_after is not None:
        callbacks.append(StopAfter(chosen.stop_after))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=8, num_train_epochs=3, logging_steps=5, save_strategy="no",
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = resumable(Trainer)(model, args, train_dataset=Counting(), callbacks=callbacks)
        done = trainer.train(resume_from_checkpoint=True)
    print(f"steps {done.global_step}, loss {done.training_loss:.4f}")


if __name__ == "__main__":
    main()
