"""The example that makes a folder for transformers out of a training's checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.python_forks import run_python

import vescale_ckpt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """As train_fsdp.py saves it, of a tiny network; its weights."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from minilm import random_tiny
    finally:
        sys.path.remove(str(EXAMPLES))
    model = random_tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(24).view(2, 12)).sum().backward()
    optimizer.step()
    vescale_ckpt.save(directory, {"train": {"model": model, "optimizer": optimizer, "step": 3}})
    return dict(model.state_dict())


@pytest.mark.slow
def test_transformers_loads_what_it_exports(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    weights = _checkpoint(tmp_path / "checkpoint")
    folder = tmp_path / "folder"
    command = [sys.executable, str(EXAMPLES / "export_hf.py"), str(tmp_path / "checkpoint"), str(folder), "--head=8"]
    command += ["--dtype=bfloat16", "--max-shard-size=40KB"]
    run = run_python(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr
    assert not (folder / "model.safetensors").exists()
    model, report = transformers.BertModel.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    loaded = model.state_dict()
    assert len(loaded) > 30
    for name, tensor in loaded.items():
        assert torch.equal(tensor, weights[name].to(torch.bfloat16)), name
