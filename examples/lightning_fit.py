"""A fit of Lightning's Trainer, which goes on where a kill ended it: python lightning_fit.py; run it again."""

import sys

import torch

try:
    from checkflow.integrations.lightning import CheckflowCallback
except ImportError:
    sys.exit("lightning is not installed: pip install lightning")
import lightning.pytorch as pl

import checkflow


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0].sum(1, keepdim=True))
        print(f"epoch {self.current_epoch}, step {self.global_step + 1}, loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


pl.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
loader = checkflow.ResumableLoader(data, batch_size=5, shuffle=True, seed=0)
options = {"enable_checkpointing": False, "logger": False, "accelerator": "cpu"}
trainer = pl.Trainer(max_epochs=3, callbacks=[CheckflowCallback("checkpoints")], **options)
trainer.fit(Module(), loader)
