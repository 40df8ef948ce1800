"""Saves into a folder of each node, which together are one checkpoint: replicas get one name, and one metadata."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.files import named_by_index
from harness.ranks import run_ranks
from harness.saves import save_on_nodes
from harness.states import numbers, sharded
from torch.distributed.tensor import Replicate, Shard

import vescale_ckpt

KINDS = ["replicas", "hsdp", "shards", "uneven"]


def _state(kind: str) -> dict[str, Any]:
    full = numbers(64, 96)
    if kind == "replicas":
        return {"w": full, "step": 7}
    if kind == "hsdp":  # shards within a node, replicas between nodes
        return {"w": sharded(full, Replicate(), Shard(0), mesh=(2, 2)), "b": numbers(5), "step": 7}
    if kind == "shards":
        return {"w": sharded(full, Shard(0)), "b": numbers(5), "step": 7}
    return {"w": full} if dist.get_rank() < 2 else {"w": full, "more": numbers(70), "step": 7}


def _save(root: Path, kind: str, asynchronous: bool) -> None:
    node = dist.get_rank() // 2
    os.environ["VESCALE_CKPT_NODE"] = str(node)
    save_on_nodes(root / f"node{node}", _state(kind), async_checkpoint=asynchronous).result()


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".distcp"}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_folders_together_are_one_checkpoint(kind: str, asynchronous: bool, tmp_path: Path) -> None:
    run_ranks(4, _save, tmp_path, kind, asynchronous)
    first, second = tmp_path / "node0", tmp_path / "node1"
    assert (first / ".metadata").read_bytes() == (second / ".metadata").read_bytes()
    named = named_by_index(first)
    of_first, of_second = _files(first), _files(second)
    assert of_first.keys() | of_second.keys() == named
    for name in of_first.keys() & of_second.keys():
        assert of_first[name] == of_second[name]
    for folder in (first, second):
        assert vescale_ckpt.verify(folder).ok == (_files(folder).keys() == named) == (kind in ("replicas", "hsdp"))

    both = tmp_path / "both"
    shutil.copytree(first, both)
    for name, content in of_second.items():
        (both / name).write_bytes(content)
    full = numbers(64, 96)
    wanted: dict[str, Any] = {"w": torch.zeros_like(full), "step": 0}
    dcp.load(wanted, checkpoint_id=str(both), no_dist=True)  # stock
    assert torch.equal(wanted["w"], full) and wanted["step"] == 7
    assert vescale_ckpt.verify(both).ok
