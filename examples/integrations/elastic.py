"""A training that torchrun may restart, shrink, grow or preempt: it goes on from the step that was saved last.

torchrun --nproc-per-node=2 --max-restarts=3 elastic.py runs/a
"""

import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from vescale_ckpt import CheckpointManager, PerRank, RandomState, Schedule

ROWS, LENGTH, WORDS, WIDTH = 48, 48, 256, 96  # of the whole batch, whatever the number of ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 192, batch_first=True) for _ in range(2)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.embed(tokens))).flatten(0, 1), tokens.flatten())


def main(directory: str, steps: int = 8) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # equal weights on all ranks
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(fully_shard(model).parameters(), lr=3e-3)
    torch.manual_seed(rank)  # each rank has its own dropout
    state = {"model": model, "optimizer": optimizer, "random": PerRank(RandomState())}
    # SIGTERM asks for one more save: on all ranks, whichever rank got it.
    schedule = Schedule(steps=2, signal=signal.SIGTERM)
    with CheckpointManager(directory, max_to_keep=3, schedule=schedule) as manager:
        first = 1 if manager.latest() is None else manager.restore(state) + 1
        for step in range(first, steps + 1):
            batch = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
            loss = model(batch.chunk(ranks)[rank])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss := loss.detach() / ranks)
            if rank == 0:
                print(f"step {step} loss {loss.item().hex()}", flush=True)
            manager.save(step, state)
            if manager.preempted:  # the checkpoint of this step is durable
                break
    time.sleep(0.3)  # gloo's threads may abort a program that ends right after its last message
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
