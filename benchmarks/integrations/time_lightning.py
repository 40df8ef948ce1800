"""Times saves and loads of Lightning's ModelParallelStrategy (FSDP2) and of this package's, in turn, in one job.

    torchrun --nproc-per-node=2 benchmarks/integrations/time_lightning.py FOLDER [--rounds 5] [--width 1024]

Prints the median seconds of each, and the median of the ratios within the rounds. Loads find the files in the page
cache. `blocked` is how long an asynchronous save keeps training waiting.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable
from statistics import median

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

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


def seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


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
    times: dict[str, dict[str, list[float]]] = {name: {} for name in trainers}
    for number in range(options.rounds + 1):
        for name, trainer in trainers.items():
            path = os.path.join(options.folder, f"{name}-{number}")
            strategy = trainer.strategy
            found = {"save": seconds(lambda trainer=trainer, path=path: trainer.save_checkpoint(path))}
            if strategy is trainers["ours, asynchronous"].strategy:
                found["blocked"] = found["save"]
                found["save"] += seconds(strategy.wait_for_save)
            found["load"] = seconds(lambda strategy=strategy, path=path: strategy.load_checkpoint(path))
            if number > 0:  # the first one warms up
                for what, took in found.items():
                    times[name].setdefault(what, []).append(took)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(options.folder)
    if dist.get_rank() == 0:
        count = sum(p.numel() for p in trainers["ours"].lightning_module.parameters())
        print(f"{3 * 4 * count / 1e6:.0f} MB, {dist.get_world_size()} ranks, {options.rounds} rounds")
        for name, found in times.items():
            for what, took in found.items():
                stock = times["stock"]["save" if what == "blocked" else what]
                ratio = median(s / t for s, t in zip(stock, took, strict=True))
                print(f"{name:20} {what:8} {median(took):8.3f} s   stock takes {ratio:.2f} times as long")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
