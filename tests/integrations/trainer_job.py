"""Trains a small Llama with a Trainer of `OneCommit`, and resumes. Arguments: place of checkpoints, [fsdp]."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from vescale_ckpt.integrations.transformers import OneCommit


class OneCommitTrainer(OneCommit, Trainer):
    pass


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']).hex()}", flush=True)


def main(place: str, way: str = "plain") -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        attention_dropout=0.1,
    )  # fmt: skip
    words = torch.randint(0, 64, (64, 16))
    sharding = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    arguments = TrainingArguments(
        str(Path.cwd() / "own"), max_steps=8, save_steps=1, logging_steps=1, learning_rate=1e-2, save_total_limit=3,
        per_device_train_batch_size=4, report_to=[], **(sharding if way == "fsdp" else {"use_cpu": True}),
    )  # fmt: skip
    data = [{"input_ids": line, "labels": line} for line in words]
    model = LlamaForCausalLM(config)
    trainer = OneCommitTrainer(model, arguments, train_dataset=data, callbacks=[PrintLoss()], checkpoints=place)
    trainer.train(resume_from_checkpoint=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
