"""Saves a model that transformers has sharded with `save_pretrained(distributed_checkpoint=True)`, first by torch's
writer, then inside `dcp_defaults`, into the same folder, and loads it in all ways of transformers.

    python tests/integrations/save_distributed.py DIRECTORY fsdp|tp    (on each rank)
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed import checkpoint as of_transformers

from vescale_ckpt.integrations import dcp_defaults

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def assert_equal(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        pair = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in (ours, theirs)]
        assert torch.equal(*pair)


def main(directory: str, way: str) -> None:
    dist.init_process_group("gloo")
    ranks, base, folder = dist.get_world_size(), f"{directory}/base", f"{directory}/saved"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, tie_word_embeddings=way == "tp", **SIZES)
        LlamaForCausalLM(config).save_pretrained(base)
    dist.barrier()
    sharded = DistributedConfig(fsdp_size=ranks) if way == "fsdp" else DistributedConfig(tp_size=ranks, tp_plan="auto")
    model = LlamaForCausalLM.from_pretrained(base, distributed_config=sharded)
    model.save_pretrained(folder, distributed_checkpoint=True)
    assert "shard-00001-model-00001-of-00001.safetensors" in os.listdir(folder)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2)
    with dcp_defaults() as made:
        model.save_pretrained(folder, distributed_checkpoint=True)
    assert not any("transformers" in name for name in made.not_reached), made.not_reached
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert_equal(model, LlamaForCausalLM.from_pretrained(folder))
    loaded = LlamaForCausalLM.from_pretrained(folder, distributed_config=sharded)
    assert_equal(model, loaded)
    with torch.no_grad():
        for value in loaded.parameters():
            value.zero_()
    of_transformers._load_model_checkpoint_distributed(loaded, folder)  # torch's HuggingFaceStorageReader
    assert_equal(model, loaded)
    if dist.get_rank() == 0:
        of_transformers.consolidate_distributed_checkpoint(folder, f"{directory}/consolidated")
        print("step 1 loss 0x0p+0", flush=True)
    dist.barrier()
    time.sleep(0.3)  # else gloo may abort when the process ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
