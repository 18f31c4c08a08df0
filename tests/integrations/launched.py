"""A fit whose processes Lightning starts itself, the first one being this: python launched.py STORE [RANK].

The rank is killed in the middle. Each says "end RANK STEPS WEIGHTS".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from checkflow.integrations.lightning import CheckflowCallback

KILLED = 10  # steps, of 16


class Fitted(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        time.sleep(0.02)  # so that ranks agree on a checkpoint before the next
        if self.global_step == KILLED and sys.argv[2:] == [str(self.global_rank)]:
            os.kill(os.getpid(), signal.SIGKILL)
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        max_epochs=2, strategy="ddp", devices=2, accelerator="cpu", callbacks=[CheckflowCallback(sys.argv[1])],
        enable_checkpointing=False, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Fitted()
    data = torch.utils.data.TensorDataset(torch.randn(80, 4))
    trainer.fit(module, StatefulDataLoader(data, batch_size=5, shuffle=True))
    weights = module.layer.weight.flatten().tolist()
    sys.stdout.write(" ".join(map(str, ("end", trainer.global_rank, trainer.global_step, *weights))) + "\n")
