"""Trains with FSDP2 by Accelerate, and saves with its own `save_state`, whose files this package writes and reads.

accelerate launch examples/integrations/accelerate_fsdp.py DIRECTORY
"""

import os
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn

from vescale_ckpt.integrations import dcp_defaults

STEPS, SAVE_EVERY = 8, 2


def main(directory: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    project = ProjectConfiguration(directory, automatic_checkpoint_naming=True)
    accelerator = Accelerator(fsdp_plugin=plugin, project_config=project)
    set_seed(accelerator.process_index)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    step = 0
    with dcp_defaults():
        if os.path.isdir(saved := os.path.join(directory, "checkpoints")):
            project.iteration = 1 + max(int(name.rpartition("_")[2]) for name in os.listdir(saved))
            accelerator.load_state()  # the newest
            step = project.iteration * SAVE_EVERY
        while step < STEPS:
            inputs = torch.randn(8, 32, device=accelerator.device)
            loss = nn.functional.mse_loss(model(inputs), inputs[:, :8])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            mean = accelerator.reduce(loss.detach(), "mean").item()
            if step % SAVE_EVERY == 0:
                accelerator.save_state()
            if accelerator.is_main_process:
                print(f"step {step} loss {mean.hex()}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
