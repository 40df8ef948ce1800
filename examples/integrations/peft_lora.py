"""Trains a LoRA adapter of a small Llama that FSDP2 shards; saves the adapter only, and resumes by itself.

torchrun --nproc_per_node 2 examples/integrations/peft_lora.py DIRECTORY
"""

import sys
import time

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from vescale_ckpt import CheckpointManager, PerRank, RandomState
from vescale_ckpt.integrations.peft import Adapter, save_adapter

STEPS, SAVE_EVERY = 8, 2
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(directory: str) -> None:
    dist.init_process_group()
    torch.manual_seed(0)  # in place of from_pretrained: the same base in each job
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES))
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-1)
    state = {"model": Adapter(model), "optimizer": optimizer, "random": PerRank(RandomState())}
    torch.manual_seed(dist.get_rank())

    with CheckpointManager(directory, max_to_keep=3, save_interval_steps=SAVE_EVERY) as manager:
        step = manager.restore(state) if manager.latest() is not None else 0
        while step < STEPS:
            words = torch.randint(0, 64, (4, 16), device=model.device)
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean.item().hex()}", flush=True)
            manager.save(step, state)
    save_adapter(model, f"{directory}/adapter")  # PeftModel.from_pretrained(base, ...) reads it
    time.sleep(0.3)  # else gloo may abort when the process ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
