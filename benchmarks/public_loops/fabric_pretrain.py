"""As LitGPT's pretrain.py is written: Fabric, an endless iterator over a loader with a state, accumulated gradients.

python fabric_pretrain.py --data_dir DATA --out_dir OUT --max_steps 60
"""

import argparse
import math
import os

import numpy as np
import torch
from gpt import GPT, GPTConfig
from lightning.fabric import Fabric
from torchdata.stateful_dataloader import StatefulDataLoader


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--out_dir", default="out")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--save_interval", type=int, default=20)
    parser.add_argument("--eval_interval", type=int, default=10)
    parser.add_argument("--eval_iters", type=int, default=2)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_iters", type=int, default=2)
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--min_lr", type=float, default=1e-4)
    parser.add_argument("--max_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class TokenBlocks(torch.utils.data.Dataset):
    def __init__(self, path, block_size):
        self.tokens, self.size = np.fromfile(path, dtype=np.uint16), block_size + 1

    def __len__(self):
        return len(self.tokens) // self.size

    def __getitem__(self, index):
        return torch.from_numpy(self.tokens[index * self.size : (index + 1) * self.size].astype(np.int64))


class CycleIterator:
    """An iterator over a loader, without end."""

    def __init__(self, iterable):
        self.iterable, self.epoch, self._iterator = iterable, 0, None

    def __iter__(self):
        return self

    def __next__(self):
        if self._iterator is None:
            self._iterator = iter(self.iterable)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator, self.epoch = iter(self.iterable), self.epoch + 1
            return next(self._iterator)


def get_lr(learning_rate, it, warmup_iters, max_iters, min_lr):
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    if it > max_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def validate(model, val_dataloader, max_iters):
    model.eval()
    losses = [model(batch[:, :-1], batch[:, 1:])[1] for _, batch in zip(range(max_iters), val_dataloader)]
    model.train()
    return torch.stack(losses).mean()


def fit(fabric, args, state, model, optimizer, train_dataloader, val_dataloader):
    accumulation = args.gradient_accumulation_iters
    max_iters = args.max_steps * accumulation
    warmup_iters = args.lr_warmup_steps * accumulation
    for train_data in CycleIterator(train_dataloader):
        if state["iter_num"] >= max_iters:
            break
        lr = get_lr(args.learning_rate, state["iter_num"], warmup_iters, max_iters, args.min_lr)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr

        state["iter_num"] += 1
        is_accumulating = state["iter_num"] % accumulation != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            _, loss = model(train_data[:, :-1], train_data[:, 1:])
            fabric.backward(loss / accumulation)
        state["running_loss"] = 0.9 * state["running_loss"] + 0.1 * loss.item()

        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=args.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1
            fabric.print(f"step {state['step_count']}: loss {state['running_loss']:.4f}, lr {lr:.2e}")

        if not is_accumulating and state["step_count"] % args.eval_interval == 0:
            state["val_loss"] = validate(model, val_dataloader, args.eval_iters).item()
            fabric.print(f"step {state['step_count']}: val loss {state['val_loss']:.4f}")

        if not is_accumulating and state["step_count"] % args.save_interval == 0:
            everything = {**state, "model": model, "optimizer": optimizer, "train_dataloader": train_dataloader}
            fabric.save(os.path.join(args.out_dir, f"step-{state['step_count']:08d}.ckpt"), everything)


def main():
    args = parse_args()
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(args.seed)
    os.makedirs(args.out_dir, exist_ok=True)
    config = GPTConfig()
    with fabric.init_module():
        model = GPT(config)
    model = fabric.setup(model)
    optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=args.learning_rate, betas=(0.9, 0.95))
    optimizer = fabric.setup_optimizers(optimizer)
    train_dataloader, val_dataloader = (
        StatefulDataLoader(
            TokenBlocks(os.path.join(args.data_dir, f"{split}.bin"), config.block_size),
            batch_size=args.micro_batch_size,
            shuffle=split == "train",
        )
        for split in ("train", "val")
    )
    state = {"iter_num": 0, "step_count": 0, "running_loss": 0.0, "val_loss": float("inf")}
    fit(fabric, args, state, model, optimizer, train_dataloader, val_dataloader)
    return model, optimizer, train_dataloader, state


if __name__ == "__main__":
    model, optimizer, train_dataloader, state = main()
