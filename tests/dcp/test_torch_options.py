"""Tests the options of torch's own storage and planners: taken, or refused with a reason."""

from __future__ import annotations

import concurrent.futures
import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import faults
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import SerializationFormat

import vescale_ckpt
from vescale_ckpt.integrations.dcp import DefaultPlanner, DefaultReader, DefaultWriter


def test_options_without_effect_are_taken(tmp_path: Path) -> None:
    writer = DefaultWriter(
        tmp_path, per_thread_copy_ahead=1, cache_staged_state_dict=True,
        serialization_format=SerializationFormat.TORCH_SAVE, _extensions=[],
    )  # fmt: skip
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=DefaultPlanner(dedup_replicated_tensors=True))
    assert vescale_ckpt.load(tmp_path)["w"].tolist() == [1.0] * 3


def test_options_that_change_the_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format='safetensors'"):
        DefaultWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match="FileSystemWriter"):
        DefaultWriter(tmp_path, _extensions=[object()])
    with pytest.raises(ValueError, match="per_thread_copy_ahead"):
        DefaultWriter(tmp_path, per_thread_copy_ahead=-1)


def test_the_lowest_rank_has_torchs_name() -> None:
    assert DefaultPlanner(dedup_save_to_lowest_rank=True).placement == "lowest_rank"
    assert DefaultPlanner().placement == "balanced"


def test_a_registry_of_stream_extensions_is_refused(tmp_path: Path) -> None:
    DefaultReader(tmp_path, None)
    with pytest.raises(ValueError, match="FileSystemReader"):
        DefaultReader(tmp_path, ExtensionRegistry())


def test_the_future_of_a_save_is_done_after_its_callbacks(tmp_path: Path) -> None:
    handle = vescale_ckpt.save(tmp_path, {"w": torch.ones(3)}, async_checkpoint=True)
    seen: list[bool] = []
    handle.add_done_callback(lambda handle: seen.append(handle.future.done()))
    assert isinstance(handle.future, concurrent.futures.Future) and not handle.future.cancel()
    assert concurrent.futures.wait([handle.future], timeout=60).not_done == set()
    assert handle.future.result() == handle.result() and len(seen) == 1


def test_an_error_that_the_future_raised_is_not_raised_again(tmp_path: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 1000)
    handle = vescale_ckpt.save(tmp_path, {"w": torch.ones(3)}, async_checkpoint=True)
    with pytest.raises(vescale_ckpt.CheckpointError, match="Input/output"):
        handle.future.result(60)
    faults.clear()
    vescale_ckpt.save(tmp_path, {"w": torch.ones(3)})

    faults.inject("sync", errno.EIO, 0, 1000)
    handle = vescale_ckpt.save(tmp_path, {"w": torch.ones(3)}, async_checkpoint=True)
    assert isinstance(handle.future.exception(60), vescale_ckpt.CheckpointError)
    faults.clear()
    with pytest.raises(vescale_ckpt.SaveFailedError):  # nobody has raised it yet
        vescale_ckpt.save(tmp_path, {"w": torch.ones(3)})
