"""Start from the weights in a repository of the Hugging Face Hub.

    python examples/resume_from_hub.py ORG/NAME [REVISION]

Under torchrun the ranks of a machine share one download; each rank then reads only what it holds.
"""

from __future__ import annotations

import sys

import torch
from huggingface_hub import snapshot_download

import vescale_ckpt


def main(repository: str, revision: str | None = None) -> torch.nn.Module:
    model = torch.nn.Linear(64, 64)
    folder = snapshot_download(repository, revision=revision, allow_patterns=["*.safetensors", "*.json"])
    vescale_ckpt.load(folder, {"": model})
    return model


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
