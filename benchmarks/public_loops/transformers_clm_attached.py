"""As transformers' run_clm.py is written: arguments in dataclasses, a text in blocks, Trainer.

    python transformers_clm.py --train_file train.txt --validation_file val.txt --output_dir OUT --max_steps 60

A token is a byte, so that no tokenizer has to be fetched.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from checkflow.integrations.transformers import CheckflowCallback, resumable
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    config_overrides: str = field(default="n_embd=128,n_layer=4,n_head=4,vocab_size=256")


@dataclass
class DataTrainingArguments:
    train_file: str = field(default="train.txt")
    validation_file: str = field(default="val.txt")
    block_size: int = field(default=64)


def group_texts(path, block_size):
    tokens = list(Path(path).read_bytes())
    total_length = len(tokens) // block_size * block_size
    blocks = [tokens[i : i + block_size] for i in range(0, total_length, block_size)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    config = GPT2Config(n_positions=data_args.block_size, bos_token_id=0, eos_token_id=0)
    config.update_from_string(model_args.config_overrides)
    model = GPT2LMHeadModel(config)
    print(
        f"Training new model from scratch - Total size={sum(p.numel() for p in model.parameters()) / 1e6:.2f}M params"
    )

    train_dataset = group_texts(data_args.train_file, data_args.block_size)
    eval_dataset = group_texts(data_args.validation_file, data_args.block_size)

    trainer = resumable(Trainer)(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        callbacks=[CheckflowCallback("checkpoints")],
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=True)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    return trainer


if __name__ == "__main__":
    trainer = main()
