"""A loop of Accelerate's, which goes on where a kill ended it: python accelerate_loop.py; run it again."""

import sys

import torch

try:
    from checkflow.integrations.accelerate import attach
except ImportError:
    sys.exit("accelerate is not installed: pip install accelerate")
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
inputs = torch.randn(40, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=5, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

with attach(accelerator, model, optimizer, loader=loader, scheduler=scheduler, store="checkpoints") as ckpt:
    done = ckpt.restore()
    for epoch in range(loader.iteration, EPOCHS):
        for batch, wanted in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), wanted)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                print(f"epoch {epoch}, iteration {done}, loss {loss.item():.6f}", flush=True)
                ckpt.step()
