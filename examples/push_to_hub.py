"""Push the weights of each checkpoint to a repository of the Hugging Face Hub, in one commit, while training goes on.

    python examples/push_to_hub.py RUN ORG/NAME

The repository must exist: `hf repo create ORG/NAME`. Token and endpoint are those of huggingface_hub.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from huggingface_hub import HfApi

import vescale_ckpt


def main(run: str, repository: str) -> None:
    model = torch.nn.Linear(64, 64)

    def push(step: int, checkpoint: str) -> None:
        """Runs on the coordinator, beside the training, once a checkpoint is durable."""
        with tempfile.TemporaryDirectory() as folder:
            vescale_ckpt.convert(checkpoint, folder, format="safetensors", keys="model", rename={"model": ""},
                                 overwrite=True)  # fmt: skip
            HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Step {step}",
                                  delete_patterns="*.safetensors*")  # fmt: skip

    with vescale_ckpt.CheckpointManager(run, max_to_keep=3, on_commit=push) as manager:
        for step in (1, 2):
            with torch.no_grad():
                model.weight.fill_(step)
            manager.save(step, {"model": model, "step": step})


if __name__ == "__main__":
    main(*sys.argv[1:])
