"""Loads from a safetensors folder while exports replace its model: they read again, and call nothing damaged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import steps
from harness.ranks import run_ranks
from harness.states import assert_same

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, StorageReader

State = dict[str, torch.Tensor]


def numbered(k: int, files: int = 2) -> State:
    return {f"w{number}": torch.full((4096,), float(k)) for number in range(files)}


def exporting(monkeypatch: pytest.MonkeyPatch, export: Callable[[int], None], times: int) -> None:
    """Calls `export` with 1, 2, … before each of the first reads of data, when headers were read already."""
    read, done = StorageReader.read, itertools.count(1)

    def disturbed(*args: Any) -> None:
        if (number := next(done)) <= times:
            export(number)
        read(*args)

    monkeypatch.setattr(StorageReader, "read", disturbed)


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_model_that_an_export_replaces_is_read_again(
    tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(k: int) -> None:
        model = {**numbered(k), "more": torch.full((4096,), float(k))}
        size = {1: "5GB", 2: 32 << 10, 3: 16 << 10}[files]
        vescale_ckpt.save(tmp_path, model, format=vescale_ckpt.Safetensors(max_shard_size=size))

    vescale_ckpt.save(tmp_path, numbered(0), format=vescale_ckpt.Safetensors(max_shard_size=16 << 10))
    exporting(monkeypatch, export, 2)
    filled = numbered(7)
    vescale_ckpt.load(tmp_path, filled, strict=False)
    assert_same(filled, numbered(2))
    exporting(monkeypatch, export, 1)
    assert vescale_ckpt.load(tmp_path)["w1"][0] == 1


def test_exports_without_end_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(k: int) -> None:
        vescale_ckpt.save(tmp_path, numbered(k), format=vescale_ckpt.Safetensors(max_shard_size=16 << 10))

    export(0)
    exporting(monkeypatch, export, 1000)
    with pytest.raises(CheckpointError, match="load it again") as raised:
        vescale_ckpt.load(tmp_path, numbered(7))
    assert not isinstance(raised.value, CorruptCheckpointError)
    steps.instead("read the index of a model", lambda path: export(9) or {"w0": "gone.safetensors"}).start()
    with pytest.raises(CheckpointError, match="follow each other") as raised:
        vescale_ckpt.load(tmp_path, numbered(7))
    assert not isinstance(raised.value, CorruptCheckpointError)


def _loaded_while_replaced(directory: Path) -> float:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:

            def export(_: int) -> None:
                for path in (directory / "1").iterdir():
                    path.replace(directory / "0" / path.name)

            exporting(patch, export, 1)
        filled = numbered(7)
        vescale_ckpt.load(directory / "0", filled, broadcast_checkpoint=False, timeout=60.0)
    return float(torch.stack([*filled.values()]).unique())


def test_ranks_read_again_together(tmp_path: Path) -> None:
    for k in range(2):
        vescale_ckpt.save(tmp_path / str(k), numbered(k), format=vescale_ckpt.Safetensors(max_shard_size=16 << 10))
    assert run_ranks(2, _loaded_while_replaced, tmp_path) == [1.0, 1.0]
