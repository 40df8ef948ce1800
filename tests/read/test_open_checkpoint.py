"""What counts as a checkpoint that is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import Safetensors
from vescale_ckpt._checkpoint.recognize import committed_at


@pytest.mark.parametrize(
    ("format", "last"),
    [
        ("dcp", ".metadata"),
        ("safetensors", "model.safetensors"),
        (Safetensors(max_shard_size=16), "model.safetensors.index.json"),
    ],
    ids=["dcp", "one file", "several files"],
)
def test_a_folder_is_committed_when_its_last_file_is_there(checkpoint: Path, format: Any, last: str) -> None:
    assert committed_at(str(checkpoint)) is None
    vescale_ckpt.save(checkpoint, {"a": torch.ones(4), "b": torch.ones(4)}, format=format)
    os.utime(checkpoint / last, ns=(1, 7_000))
    assert committed_at(str(checkpoint)) == 7_000
    (checkpoint / last).unlink()
    assert committed_at(str(checkpoint)) is None
