"""Trains a LoRA adapter with TRL's SFTTrainer and FSDP2, and resumes from its newest checkpoint.

python tests/integrations/without_gpu.py tests/integrations/sft_fsdp.py DIRECTORY
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from vescale_ckpt.integrations import dcp_defaults
from vescale_ckpt.integrations.peft import save_adapter
from vescale_ckpt.integrations.transformers import last_sound_checkpoint

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']).hex()}", flush=True)


def main(directory: str) -> None:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({"<eos>": 0, **{str(i): i for i in range(1, 64)}}, unk_token="<eos>"))
    config = SFTConfig(
        directory,
        max_steps=8,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-1,
        per_device_train_batch_size=4,
        max_length=16,
        bf16=False,
        gradient_checkpointing=False,
        fsdp=True,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        report_to=[],
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)),
        config,
        train_dataset=Dataset.from_dict({"input_ids": torch.randint(1, 64, (64, 16)).tolist()}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[PrintLoss()],
    )
    with dcp_defaults():
        trainer.train(resume_from_checkpoint=last_sound_checkpoint(directory))
    save_adapter(trainer.model, f"{directory}/adapter")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
