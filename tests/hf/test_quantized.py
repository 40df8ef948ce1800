"""Quantised models: their scales are never left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as stock_torch
import torch
import torch.distributed.checkpoint as dcp
from harness.saves import cause
from harness.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

import vescale_ckpt
from vescale_ckpt import CheckpointError, LoadPlanner, StorageReader


class OtherPlanner(LoadPlanner):
    """Gives its items one by one."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item)


State = dict[str, torch.Tensor]


def written(folder: Path, state: State, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    stock_torch.save_file(state, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "any", "quantization_config": config}))
    return folder


def scaled(suffix: str) -> State:
    weight = torch.arange(64, dtype=torch.float32).view(8, 8).to(torch.float8_e4m3fn)
    return {"a.weight": weight, f"a.weight{suffix}": torch.full((1, 1), 3.0), "a.bias": torch.ones(8)}


@pytest.mark.parametrize("suffix", ["_scale_of_mine", "_scale", "_scale_inv"])
def test_a_cast_never_leaves_scales_out(tmp_path: Path, suffix: str) -> None:
    state = scaled(suffix)
    folder = written(tmp_path / "model", state)
    target = {"a.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    if suffix == "_scale_of_mine":  # fp8 without scales is a dtype as others
        vescale_ckpt.load(folder, target, allow_cast=True)
        assert_same(target["a.weight"], state["a.weight"].to(torch.bfloat16))
        return
    for load in (
        lambda: vescale_ckpt.load(folder, target, allow_cast=True),
        lambda: vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", dtype="bf16"),
        lambda: dcp.load(target, storage_reader=StorageReader(folder), planner=LoadPlanner(allow_cast=True)),
        lambda: dcp.load(target, storage_reader=StorageReader(folder), planner=OtherPlanner(allow_cast=True)),
    ):
        with pytest.raises((CheckpointError, CheckpointException), match=rf"a.weight: .*a.weight{suffix}") as caught:
            load()
        error = caught.value
        assert isinstance(cause(error) if isinstance(error, CheckpointException) else error, CheckpointError)
    assert not target["a.weight"].any()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_quantised_tensors_load_and_convert_as_they_are(tmp_path: Path, suffix: str) -> None:
    state = scaled(suffix)
    folder = written(tmp_path / "model", state)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    vescale_ckpt.load(folder, target, allow_cast=True)
    vescale_ckpt.convert(folder, tmp_path / "out", format="dcp")
    for found in (target, vescale_ckpt.load(folder), vescale_ckpt.load(tmp_path / "out")):
        flat = found if "a.bias" in found else {f"a.{name}": value for name, value in found["a"].items()}
        assert flat.keys() == state.keys()
        for key, value in flat.items():
            assert_same(value.view(torch.uint8), state[key].view(torch.uint8))
