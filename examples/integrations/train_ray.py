"""A training by Ray Train that goes on when a worker dies or it is started again: `python train_ray.py runs/a`"""

import sys

import torch
import torch.distributed as dist
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.fsdp import fully_shard

from vescale_ckpt import PerRank, RandomState
from vescale_ckpt.integrations.ray import report, restore

ROWS, WIDTH, STEPS = 8192, 512, 8  # rows of the whole batch, whatever the number of workers


def train(config: dict) -> None:
    torch.set_num_threads(1)  # sums are then taken in one order
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # equal weights on all workers
    model = nn.Sequential(
        nn.Linear(16, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.AdamW(fully_shard(model).parameters(), lr=1e-3)
    torch.manual_seed(rank)  # each worker has its own dropout
    state = {"model": model, "optimizer": optimizer, "random": PerRank(RandomState())}
    done = restore(state) or 0
    for step in range(done + 1, STEPS + 1):
        rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach() / ranks)
        if rank == 0:
            print(f"step {step} loss {loss.item().hex()}", flush=True)
        if step % 2 == 0:
            report({"loss": loss.item()}, state, step=step)


if __name__ == "__main__":
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=int(sys.argv[2]) if len(sys.argv) > 2 else 2),
        run_config=RunConfig(
            name="run",
            storage_path=sys.argv[1],
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
