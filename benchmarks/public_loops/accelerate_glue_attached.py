"""As transformers' run_glue_no_trainer.py is written: pairs of sentences, padded by the batch, Accelerate's loop.

python accelerate_glue.py --train_file train.jsonl --validation_file val.jsonl --output_dir OUT
"""

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from checkflow.integrations.accelerate import attach
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_file", default="train.jsonl")
    parser.add_argument("--validation_file", default="val.jsonl")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--max_length", type=int, default=48)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=6)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_warmup_steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load(path, max_length):
    """A token is a byte; 256 begins, 257 separates, 258 pads."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [
        {
            "input_ids": [256, *row["sentence1"].encode(), 257, *row["sentence2"].encode(), 257][:max_length],
            "labels": row["label"],
        }
        for row in rows
    ]


def data_collator(features):
    longest = max(len(feature["input_ids"]) for feature in features)
    padded = [feature["input_ids"] + [258] * (longest - len(feature["input_ids"])) for feature in features]
    input_ids = torch.tensor(padded)
    labels = torch.tensor([feature["labels"] for feature in features])
    return {"input_ids": input_ids, "attention_mask": (input_ids != 258).long(), "labels": labels}


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)

    config = BertConfig(
        vocab_size=259, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
        num_labels=2, pad_token_id=258,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    train_dataset = load(args.train_file, args.max_length)
    eval_dataset = load(args.validation_file, args.max_length)
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=data_collator, batch_size=args.per_device_eval_batch_size)

    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)
    max_train_steps = args.num_train_epochs * -(-len(train_dataloader) // args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=max_train_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    ckpt = attach(accelerator, model, optimizer, loader=train_dataloader, scheduler=lr_scheduler, store="checkpoints")
    completed_steps = ckpt.restore()
    starting_epoch = train_dataloader.iteration
    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                print(f"step {completed_steps}: loss {outputs.loss.item():.4f}, lr {lr_scheduler.get_last_lr()[0]:.2e}")
                ckpt.step()

        model.eval()
        correct = count = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            correct += int((predictions == references).sum())
            count += len(references)
        eval_metric = {"accuracy": correct / count}
        print(f"epoch {epoch}: {eval_metric}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(args.output_dir, save_function=accelerator.save)
    with open(os.path.join(args.output_dir, "all_results.json"), "w") as f:
        json.dump({f"eval_{k}": v for k, v in eval_metric.items()}, f)
    return model, optimizer, lr_scheduler, completed_steps, eval_metric


if __name__ == "__main__":
    model, optimizer, lr_scheduler, completed_steps, eval_metric = main()
