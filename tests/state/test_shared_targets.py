"""Loads into tensors that lie in the same memory: one whole value, or a refusal; never a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.states import MiB, assert_same
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, StorageReader

ROWS, COLUMNS = 1024, 2048  # 8 MiB each: read in several pieces by several threads


@pytest.fixture(params=["ours", "stock"])
def untied(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint, with an index and checksums or without, of tensors of which two are equal."""
    state = {"a": torch.randn(ROWS, COLUMNS), "b": torch.randn(ROWS, COLUMNS)}
    state |= {"as a": state["a"].clone(), "narrow": torch.randn(ROWS, 5), "slim": torch.randn(ROWS, 5)}
    if request.param == "ours":
        vescale_ckpt.save(checkpoint, state)
    else:
        dcp.save(state, storage_writer=FileSystemWriter(checkpoint))
    return checkpoint, state


@pytest.mark.parametrize("keys", [("a", "b"), ("b", "a"), ("b", "as a", "a")])
def test_the_last_of_tied_targets_is_loaded_whole(
    untied: tuple[Path, dict[str, torch.Tensor]], keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    path, stored = untied
    target = torch.zeros(ROWS, COLUMNS)
    vescale_ckpt.load(path, dict.fromkeys(keys, target))
    assert_same(target, stored[keys[-1]])
    assert "b and a are the same memory" in caplog.text or "a and b are the same memory" in caplog.text


@pytest.mark.parametrize("by", ["ours", "stock planner"])
def test_dcp_load_gives_what_stock_gives(untied: tuple[Path, dict[str, torch.Tensor]], by: str) -> None:
    path, stored = untied
    ours, theirs = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    planner = None if by == "ours" else dcp.DefaultLoadPlanner()
    dcp.load({"b": ours, "a": ours}, storage_reader=StorageReader(path), planner=planner)
    dcp.load({"b": theirs, "a": theirs}, storage_reader=FileSystemReader(path))
    assert_same(ours, stored["b"])  # DCP sorts the keys
    assert_same(ours, theirs)


def test_equal_values_are_read_once_and_without_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    vescale_ckpt.save(checkpoint, {"embedding": weight, "head": weight.clone()})
    target = torch.zeros(ROWS, COLUMNS)
    report = vescale_ckpt.load(checkpoint, {"embedding": target, "head": target})
    assert_same(target, weight)
    assert report.stats is not None and report.stats.bytes == 8 * MiB
    assert "same memory" not in caplog.text


def test_tied_parameters_on_the_meta_device_are_loaded_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    untied = {"model": {f"{number}.weight": torch.randn(50, 50) for number in range(2)}}
    vescale_ckpt.save(checkpoint, untied)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    model[1].weight = model[0].weight
    vescale_ckpt.load(checkpoint, {"model": model})
    assert model[1].weight is model[0].weight
    assert_same(model[0].weight.detach(), untied["model"]["1.weight"])
    assert "model.0.weight and model.1.weight are the same memory" in caplog.text


@pytest.mark.parametrize(
    "views",
    [
        lambda whole: {"a": whole[:, :COLUMNS], "narrow": whole[:, COLUMNS - 1 : COLUMNS + 4]},
        lambda whole: {"a": whole[:, :COLUMNS], "b": whole[:, 5:]},
        lambda whole: {"a": whole[:, :COLUMNS], "narrow": whole[:, 10:15]},  # a part of the other
    ],
)
def test_targets_that_overlap_in_part_are_refused(untied: tuple[Path, dict[str, torch.Tensor]], views: Any) -> None:
    whole = torch.zeros(ROWS, COLUMNS + 5)
    state = views(whole)
    first, second = state
    with pytest.raises(CheckpointError, match=f"{first} and {second}: .*overlap in part.*clone") as raised:
        vescale_ckpt.load(untied[0], state)
    assert not isinstance(raised.value, vescale_ckpt.CorruptCheckpointError)
    assert not whole.any()


def test_views_that_share_no_element_are_loaded(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, stored = untied
    whole = torch.zeros(ROWS, 5 + COLUMNS)
    vescale_ckpt.load(path, {"narrow": whole[:, :5], "a": whole[:, 5:]})
    assert_same(whole, torch.cat([stored["narrow"], stored["a"]], 1))
    interleaved = torch.zeros(ROWS, 5, 2)
    vescale_ckpt.load(path, {"narrow": interleaved[..., 0], "slim": interleaved[..., 1]})
    assert_same(interleaved, torch.stack([stored["narrow"], stored["slim"]], -1))


@on_ranks(2)
def test_ranks_that_read_for_each_other_load_the_last_one(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory = untied[0]
    mesh = init_device_mesh("cpu", (2,))
    target = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(1)])
    vescale_ckpt.load(directory, {"a": target, "b": target}, broadcast_checkpoint=True)
    stored = vescale_ckpt.load(directory)["b"]
    assert torch.equal(target.to_local(), stored.chunk(2, dim=1)[dist.get_rank()])


def test_a_target_that_is_not_there_takes_no_others_place(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, stored = untied
    target = torch.zeros(ROWS, COLUMNS)
    report = vescale_ckpt.load(path, {"a": target, "gone": target[:, :9]}, strict=False)
    assert report.missing == ["gone"]
    assert_same(target, stored["a"])
