"""Trains a model that transformers itself shards (`DistributedConfig`), and resumes from its newest checkpoint.

torchrun --nproc_per_node 2 examples/integrations/transformers_native.py DIRECTORY
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from vescale_ckpt import CheckpointManager, PerRank, RandomState
from vescale_ckpt.integrations.transformers import save_pretrained

STEPS, SAVE_EVERY = 8, 2
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(directory: str) -> None:
    dist.init_process_group()
    rank, base = dist.get_rank(), f"{directory}/base"
    if rank == 0 and not os.path.isdir(base):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **SIZES)).save_pretrained(base)
    dist.barrier()
    sharded = DistributedConfig(fsdp_size=dist.get_world_size())
    model = LlamaForCausalLM.from_pretrained(base, distributed_config=sharded).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    state = {"model": model, "optimizer": optimizer, "random": PerRank(RandomState())}

    with CheckpointManager(directory, max_to_keep=3, save_interval_steps=SAVE_EVERY) as manager:
        step = manager.restore(state) if manager.latest() is not None else 0
        while step < STEPS:
            words = torch.randint(0, 64, (4, 16), device=model.device)
            loss = model(words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if rank == 0:
                print(f"step {step} loss {mean.item().hex()}", flush=True)
            manager.save(step, state)
    save_pretrained(model, f"{directory}/final")  # from_pretrained reads it, sharded or not
    time.sleep(0.3)  # else gloo may abort when the process ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
