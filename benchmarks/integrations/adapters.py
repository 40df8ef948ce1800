"""Measures a checkpoint of a LoRA training: the adapter and its optimizer state, beside one with the base model.

python benchmarks/integrations/adapters.py DIRECTORY
"""

import shutil
import sys
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import vescale_ckpt
from benchmarks.harness.by_turns import Steps, alternate, summarize, table
from benchmarks.harness.usage import measure
from vescale_ckpt.integrations.peft import Adapter

ROUNDS = 7
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}


def main(directory: str) -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=8000, **SIZES))
    model = get_peft_model(base, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    words = torch.randint(0, 8000, (1, 16))
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    states = {
        "adapter": {"model": Adapter(model), "optimizer": optimizer},
        "with its base": {"model": model, "optimizer": optimizer},
    }

    def turn(name: str) -> Steps:
        return {"save": measure(lambda: vescale_ckpt.save(f"{directory}/{name}", states[name]))}

    samples = alternate("LoRA", {name: partial(turn, name) for name in states}, ROUNDS, warmup=1)
    print(table(summarize(samples, "with its base"), "with its base"))
    for name in states:
        print(f"{name:15} {vescale_ckpt.inspect(f'{directory}/{name}').bytes / 1e6:.1f} MB")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
