"""The metadata that dcp.save returns, what a writer adds to it, and an index beside the metadata of another save."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.states import assert_same
from test_planning import BOUND, load, replicated
from torch.distributed.checkpoint import FileSystemReader

from vescale_ckpt import (
    CheckpointError,
    SavePlanner,
    StorageWriter,
)


def _saved(path: Path, k: int, **options: Any) -> dict[str, Any]:
    state = replicated(k)
    dcp.save(state, storage_writer=StorageWriter(path, **options), planner=SavePlanner())
    return state


def test_an_index_of_another_save(tmp_path: Path) -> None:
    first, second = _saved(tmp_path / "1", 1), _saved(tmp_path / "2", 2)
    shutil.copy(tmp_path / "1" / ".metadata.index", tmp_path / "2" / ".metadata.index")
    assert_same(load(str(tmp_path / "2"), second), second)
    shutil.copytree(tmp_path / "1", tmp_path / "2", dirs_exist_ok=True)
    assert_same(load(str(tmp_path / "2"), first), first)


@on_ranks(2, timeout=BOUND)
def test_the_metadata_that_a_save_returns(checkpoint: Path) -> None:
    state = replicated(1)
    metadata = dcp.save(state, storage_writer=StorageWriter(checkpoint), planner=SavePlanner())
    again = pickle.loads(pickle.dumps(metadata))
    deep = copy.deepcopy(metadata)
    replaced = dataclasses.replace(metadata, planner_data={"x": 1})
    stock = FileSystemReader(checkpoint).read_metadata()
    for one in (metadata, again, deep, copy.copy(metadata)):
        assert one.state_dict_metadata == stock.state_dict_metadata
        assert one.storage_data == stock.storage_data and one.planner_data == stock.planner_data
        assert one.version == stock.version
    assert replaced.planner_data == {"x": 1} and replaced.storage_data == stock.storage_data
    assert pickle.loads(pickle.dumps(replaced)).planner_data == {"x": 1}
    metadata.planner_data = {"y": 2}
    assert pickle.loads(pickle.dumps(metadata)).planner_data == {"y": 2}
    assert copy.deepcopy(metadata).planner_data == {"y": 2}
    unseen = dcp.save(state, storage_writer=StorageWriter(checkpoint), planner=SavePlanner())
    dcp.save(state, storage_writer=StorageWriter(checkpoint), planner=SavePlanner())
    dist.barrier()
    with pytest.raises(CheckpointError, match="replaced by a later save"):
        len(unseen.state_dict_metadata)
    dist.barrier()
    unseen = dcp.save(state, storage_writer=StorageWriter(checkpoint), planner=SavePlanner())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(checkpoint)
    dist.barrier()
    with pytest.raises(CheckpointError, match="is no directory"):
        len(unseen.state_dict_metadata)


class _NotingWriter(StorageWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        metadata.planner_data["note"] = ("note",)
        super().finish(metadata, results)


@on_ranks(2, timeout=BOUND)
def test_what_a_writer_adds_to_metadata_is_written(checkpoint: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=_NotingWriter(checkpoint), planner=SavePlanner())
    assert FileSystemReader(checkpoint).read_metadata().planner_data == {"a": ("a",), "note": ("note",)}
