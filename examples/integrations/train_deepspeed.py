"""A training that resumes by itself: `torchrun --nproc-per-node=2 train_deepspeed.py runs/a`"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # on GPUs: without this line, and with "nccl"

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from vescale_ckpt import CheckpointManager, PerRank, RandomState
from vescale_ckpt.integrations.deepspeed import engine_state

ROWS, WIDTH, STEPS = 8192, 512, 8  # rows of the whole batch, whatever the number of ranks


def main(directory: str, stage: int = 0) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # equal weights on all ranks
    model = nn.Sequential(
        nn.Linear(16, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS // ranks,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(rank)  # each rank has its own dropout
    state = {**engine_state(engine), "random": PerRank(RandomState())}
    with CheckpointManager(directory, save_interval_steps=2, max_to_keep=2) as manager:
        first = 1 if manager.latest() is None else manager.restore(state) + 1
        for step in range(first, STEPS + 1):
            rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
            loss = (engine(rows) - rows.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            dist.all_reduce(loss := loss.detach() / ranks)
            if rank == 0:
                print(f"step {step} loss {loss.item().hex()}", flush=True)
            manager.save(step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
