"""Trains with Lightning and FSDP2, saves asynchronously every 2 steps, and resumes from the newest checkpoint.

    torchrun --nproc-per-node=2 examples/integrations/train_lightning.py FOLDER

Run it again after a kill, on any number of ranks. `DDP` in place of `ModelParallel` saves a replicated model.
"""

import os
import sys
import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from vescale_ckpt.integrations.lightning import ModelParallel, newest


class Reverser(pl.LightningModule):
    """Learns to say sequences of tokens backwards."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embed = torch.nn.Embedding(32, 64)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, 32)

    def configure_model(self) -> None:
        for layer in self.layers.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)]

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))

    def training_step(self, batch, _):
        loss = F.cross_entropy(self(batch).transpose(1, 2), batch.flip(1))
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {mean.item().hex()}", flush=True)
        return loss


if __name__ == "__main__":
    folder, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
    pl.seed_everything(0)
    tokens = torch.randint(32, (2 * 8, 12), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(tokens, batch_size=8 // ranks)  # Lightning gives each rank its part
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, max_steps=8, logger=False, enable_progress_bar=False,
        strategy=ModelParallel(data_parallel_size=ranks, tensor_parallel_size=1, async_checkpoint=True),
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2)],  # keeps the newest
    )  # fmt: skip
    trainer.fit(Reverser(), data, ckpt_path=newest(folder))
    time.sleep(0.3)  # else gloo may abort when the process ends
