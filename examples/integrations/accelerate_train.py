"""Trains with Accelerate, on one or several ranks, and resumes from its newest checkpoint by itself.

accelerate launch examples/integrations/accelerate_train.py DIRECTORY [fsdp]
"""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vescale_ckpt import CheckpointManager
from vescale_ckpt.integrations.accelerate import state_of

STEPS, SAVE_EVERY = 8, 2


def main(directory: str, way: str = "ddp") -> None:
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
        if way == "fsdp"
        else None,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
    )
    set_seed(0)
    data = TensorDataset(torch.randn(96, 32), torch.randn(96, 8))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    with CheckpointManager(directory, max_to_keep=3, save_interval_steps=SAVE_EVERY) as manager:
        state = state_of(accelerator)
        step = manager.restore(state) if manager.latest() is not None else 0
        while step < STEPS:
            for inputs, targets in loader:  # goes on in the middle of an epoch
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                mean = accelerator.reduce(loss.detach(), "mean").item()
                if accelerator.is_main_process:
                    print(f"step {step} loss {mean.hex()}", flush=True)
                manager.save(step, state)
                if step == STEPS:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
