"""Times saves and loads of Lightning's ModelParallelStrategy (FSDP2) and of this package's, in turn, in one job.

    torchrun --nproc-per-node=2 benchmarks/integrations/time_lightning.py FOLDER [--rounds 5] [--width 1024]

Loads find the files in the page cache. `blocked` is how long an asynchronous save keeps training waiting.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import time
import warnings
from functools import partial

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_turns import print_turns, seconds
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.by_turns import Steps
from vescale_ckpt.integrations.lightning import ModelParallel


class Model(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(12)))

    def configure_model(self) -> None:
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self(batch).square().mean()


def trained(strategy: pl.strategies.Strategy, width: int) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Model(width), torch.utils.data.DataLoader(torch.randn(4, width)))
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size = {"data_parallel_size": int(os.environ["WORLD_SIZE"]), "tensor_parallel_size": 1}
    trainers = {
        "stock": trained(ModelParallelStrategy(**size), options.width),
        "ours": trained(ModelParallel(**size), options.width),
        "ours, asynchronous": trained(ModelParallel(async_checkpoint=True, **size), options.width),
    }

    def turn(name: str) -> Steps:
        path, trainer = os.path.join(options.folder, name), trainers[name]
        found = {"save": seconds(lambda: trainer.save_checkpoint(path))}
        if name == "ours, asynchronous":
            found["blocked"] = found["save"]
            found["save"] += seconds(trainer.strategy.wait_for_save)
        found["load"] = seconds(lambda: trainer.strategy.load_checkpoint(path))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        return found

    count = sum(parameter.numel() for parameter in trainers["ours"].lightning_module.parameters())
    case = f"{3 * 4 * count / 1e6:.0f} MB, {dist.get_world_size()} ranks"
    print_turns(case, {name: partial(turn, name) for name in trainers}, options.rounds, "stock")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
