"""Trains a small Llama with transformers' Trainer and FSDP2, and resumes from its newest checkpoint by itself.

accelerate launch examples/integrations/transformers_fsdp.py DIRECTORY
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from vescale_ckpt.integrations import dcp_defaults
from vescale_ckpt.integrations.transformers import last_sound_checkpoint, save_pretrained


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']).hex()}", flush=True)


def main(directory: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    words = torch.randint(0, 64, (64, 16))
    arguments = TrainingArguments(
        directory,
        max_steps=8,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        fsdp=True,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        report_to=[],
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=[{"input_ids": line, "labels": line} for line in words],
        callbacks=[PrintLoss()],
    )
    with dcp_defaults():
        trainer.train(resume_from_checkpoint=last_sound_checkpoint(directory))
    save_pretrained(trainer.model, f"{directory}/final")  # from_pretrained reads it
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
