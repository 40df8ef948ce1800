"""Sharded tensors on several ranks, saved and loaded by us and by stock DCP; their metadata beside that of stock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import on_ranks
from harness.saves import load_by, save_by
from harness.states import assert_same, numbers, sharded
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


@on_ranks(4)
def test_metadata_equals_stock_metadata(tmp_path: Path) -> None:
    shapes = [(16, 8), (5, 7), (1, 3), (0, 4), (3, 5, 4), (1030, 700)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float32, torch.int64]
    state: dict[str, Any] = {
        f"{shape}": sharded(numbers(*shape, dtype=dtype), Replicate(), Shard(0), mesh=(2, 2))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    }
    state |= {f"plain {i}": torch.full((i,), i) for i in range(20)} | {"nested": {"list": [torch.ones(2), {"x": 1}]}}
    ours = save_by("dcp.save", f"{tmp_path}/ours", state)
    stock = save_by("stock", f"{tmp_path}/stock", state)
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
    for key, expected in stock.state_dict_metadata.items():
        found = ours.state_dict_metadata[key]
        if isinstance(expected, TensorStorageMetadata):  # chunks are sorted, without empty ones, and may be cut
            assert (found.properties, found.size) == (expected.properties, expected.size)
            for metadata in (found, expected):
                assert sum(chunk.sizes.numel() for chunk in metadata.chunks) == expected.size.numel()
        else:
            assert found == expected
    assert ours.planner_data == stock.planner_data
    assert set(os.listdir(f"{tmp_path}/ours")) == {".metadata", ".metadata.index"} | {
        info.relative_path for info in ours.storage_data.values()
    }


@pytest.mark.parametrize(("saver", "loader"), [("dcp.save", "stock"), ("stock", "dcp.load")])
@on_ranks(4)
def test_mesh_of_some_ranks(tmp_path: Path, saver: str, loader: str) -> None:
    path = str(tmp_path / "c")
    mesh = DeviceMesh("cpu", [1, 2])  # ranks 0 and 3 hold nothing of it
    value = torch.arange(50.0).view(10, 5)
    inside = mesh.get_coordinate() is not None
    state: dict[str, Any] = {"everywhere": torch.ones(3)}
    target: dict[str, Any] = {"everywhere": torch.zeros(3)}
    state["a"] = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
    target["a"] = distribute_tensor(torch.zeros(10, 5), mesh, [Shard(1)], src_data_rank=None)
    save_by(saver, path, state)
    load_by(loader, path, target)
    assert_same(target["everywhere"], torch.ones(3))
    if inside:
        assert_same(target["a"].to_local(), value.tensor_split(2, 1)[mesh.get_local_rank()])
    whole = {"a": torch.zeros(10, 5)}
    load_by(loader, path, whole)
    assert_same(whole["a"], value)
