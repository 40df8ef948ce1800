"""Trains with DDP or FSDP1 of Lightning, saves every 2 steps, resumes. Arguments: folder, strategy, async, failing."""

import os
import sys
import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F

from vescale_ckpt._collective.save import Save
from vescale_ckpt._engine import _C
from vescale_ckpt.integrations import lightning as ours


def fsdp1_on_the_cpu(set_attribute=setattr) -> None:
    """Torch asks for an accelerator unless it is told the device, and Lightning gives it none for the CPU."""
    given = FullyShardedDataParallel.__init__

    def init(self, *args, device_id=None, **options) -> None:
        given(self, *args, device_id=torch.device("cpu") if device_id is None else device_id, **options)

    set_attribute(FullyShardedDataParallel, "__init__", init)


def fail_second_save() -> None:
    """Has the second asynchronous save fail on this rank alone."""
    write, began = Save._write_and_commit, []

    def failing(save) -> None:
        began.append(save)
        if len(began) == 2:
            save.steps.error = OSError("no disk on one rank")
        write(save)

    Save._write_and_commit = failing


def write_slowly() -> None:
    """Has asynchronous saves write 300 bytes a second."""
    make = _C.Options
    _C.Options = lambda **given: make(**(given | {"bytes_per_second": 300} if given["niceness"] else given))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def forward(self, batch):
        return self.layers(batch)

    def training_step(self, batch, _):
        loss = F.mse_loss(self(batch), batch.flip(1))
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {mean.item().hex()}", flush=True)
        return loss


if __name__ == "__main__":
    fsdp1_on_the_cpu()
    folder, strategy, *options = sys.argv[1:]
    if "failing" in options and os.environ["RANK"] == "1":
        fail_second_save()
    if "slow" in options:
        write_slowly()
    ranks = int(os.environ["WORLD_SIZE"])
    pl.seed_everything(0)
    rows = torch.randn(2 * 8, 16, generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, max_steps=8, logger=False, enable_progress_bar=False,
        enable_model_summary=False, strategy=getattr(ours, strategy)(async_checkpoint="async" in options),
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2)],
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=8 // ranks), ckpt_path=ours.newest(folder))
    time.sleep(0.3)  # else gloo may abort when the process ends
