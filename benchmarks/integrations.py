"""Saves and loads of frameworks, in their own way and by this package, in turn in one job of two ranks on CPUs.

    torchrun --nproc-per-node 2 -m benchmarks.integrations lightning|torchtitan FOLDER
    torchrun --nproc-per-node 2 tests/integrations/without_gpu.py benchmarks/integrations.py accelerate FOLDER fsdp

Loads find the files in the page cache. `blocked` is how long an asynchronous save keeps training waiting.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vescale_ckpt
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import STOCK, Steps, alternate, summarize, table

ROUNDS = 5

Save = Callable[[str], object]  # to a path
Way = tuple[Save, Save] | tuple[Save, Save, Callable[[], object]]  # a save, a load, and what waits for the save


def lightning(folder: str) -> dict[str, Way]:
    """ModelParallelStrategy (FSDP2) with AdamW, 151 MB."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from vescale_ckpt.integrations.lightning import ModelParallel

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    width = 1024

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(12)))

        def configure_model(self) -> None:
            for module in (*self.layers, self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layers(batch)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self(batch).square().mean()

    def way(kind: Callable[..., Any], **options: Any) -> Way:
        ranks = int(os.environ["WORLD_SIZE"])
        strategy = kind(data_parallel_size=ranks, tensor_parallel_size=1, **options)
        trainer = pl.Trainer(
            accelerator="cpu", devices=ranks, strategy=strategy, max_steps=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4, width)))
        calls = trainer.save_checkpoint, strategy.load_checkpoint
        return (*calls, strategy.wait_for_save) if options else calls

    return {
        STOCK: way(ModelParallelStrategy),
        "ours": way(ModelParallel),
        "ours, asynchronous": way(ModelParallel, async_checkpoint=True),
    }


def torchtitan(folder: str) -> dict[str, Way]:
    """Llama 3's debug model with AdamW. What torchtitan lacks on CPUs comes from the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))
    import torchtitan_job
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
    from torchtitan.config import ConfigManager

    torchtitan_job.prepare(folder, layers=6)
    manager = ConfigManager().parse_args().build().checkpointer
    state = manager._flattened_model_states_sd

    def way(kind: Any) -> Way:
        return (
            lambda path: kind.dcp_save(manager, state(), path, AsyncMode.DISABLED),
            lambda path: kind.dcp_load(manager, state(), path, False, False),
        )

    return {STOCK: way(CheckpointManager), "ours": way(type(manager))}


def accelerate(folder: str) -> dict[str, Way]:
    """FSDP2 with AdamW, 150 MB."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from vescale_ckpt.integrations import dcp_defaults
    from vescale_ckpt.integrations.accelerate import state_of

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator, width = Accelerator(fsdp_plugin=plugin), 1250
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(model(torch.randn(2, width, device=accelerator.device)).sum())
    optimizer.step()

    def inside(call: Save) -> Save:
        def run(path: str) -> None:
            with dcp_defaults():
                call(path)

        return run

    state = state_of(accelerator)
    return {
        STOCK: (accelerator.save_state, accelerator.load_state),
        "inside dcp_defaults": (inside(accelerator.save_state), inside(accelerator.load_state)),
        "state_of": (lambda path: vescale_ckpt.save(path, state), lambda path: vescale_ckpt.load(path, state)),
    }


def _turn(path: str, save: Save, load: Save, wait: Callable[[], object] | None = None) -> Steps:
    found = {"save": _seconds(partial(save, path))}
    if wait is not None:
        found["blocked"] = found["save"]
        found["save"] += _seconds(wait)
    page_cache.prepare(Path(path), warm=True)  # our saves pass it by
    found["load"] = _seconds(partial(load, path))
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return found


def _seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def main(framework: str, folder: str, *_: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    ways = {"accelerate": accelerate, "lightning": lightning, "torchtitan": torchtitan}[framework](folder)
    turns = {name: partial(_turn, os.path.join(folder, name), *way) for name, way in ways.items()}
    # All ranks take the same turns: their random order has the same seed.
    rows = summarize(alternate(f"{framework}, {dist.get_world_size()} ranks", turns, ROUNDS, warmup=1))
    if dist.get_rank() == 0:
        print(table(rows))
        shutil.rmtree(folder)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
