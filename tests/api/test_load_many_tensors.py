"""A load without a state runs next to no Python code for each tensor: models of very many small tensors load fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.cost import calls_of

import vescale_ckpt
from vescale_ckpt.safetensors import save_file

_FEW, _MANY = 100, 600


def _state(count: int) -> dict[str, torch.Tensor]:
    dtypes = (torch.float32, torch.int64, torch.uint8, torch.bool)
    return {f"layers.{i // 4}.w{i % 4}": torch.arange(2).to(dtypes[i % 4]) + (i % 2) for i in range(count)}


def _safetensors(path: Path, state: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(state, path / "model.safetensors")
    return path


def _two_files(path: Path, state: dict[str, torch.Tensor]) -> Path:
    vescale_ckpt.save(path, state, format=vescale_ckpt.Safetensors(max_shard_size=2048))
    return path


def _native(path: Path, state: dict[str, torch.Tensor]) -> Path:
    vescale_ckpt.save(path, state)
    return path


def _stock(path: Path, state: dict[str, torch.Tensor]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize(
    "save, most",
    [(_safetensors, 8), (_two_files, 36), (_native, 6), (_stock, 140)],
    ids=["file", "index", "native", "stock"],
)
def test_calls_for_each_tensor(save: Callable[..., Path], most: float, tmp_path: Path) -> None:
    counts = []
    for count in (_FEW, _MANY):
        state = _state(count)
        path = save(tmp_path / f"of {count}", state)
        vescale_ckpt.load(path)  # what is made once
        loaded: dict[str, Any] = {}
        counts.append(calls_of(lambda path=path, loaded=loaded: loaded.update(vescale_ckpt.load(path))))
        assert list(loaded) == list(state) if save is _native else loaded.keys() == state.keys()
        for key, value in state.items():
            assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value), key
    assert (counts[1] - counts[0]) / (_MANY - _FEW) <= most
