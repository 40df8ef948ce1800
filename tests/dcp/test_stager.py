"""`Stager` under `dcp.async_save`, and on its own."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.saves import load
from harness.snapshots import no_snapshot_is_left, snapshot_memory
from harness.states import change_all, many_kinds, same, state, state_of_rank, whole_state
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, SavePlanner, Stager, StorageWriter

BOUND = 180.0  # seconds after which something counts as hung


def test_what_is_staged_is_a_copy() -> None:
    stager, values = Stager(), many_kinds(1)
    staged = stager.stage(values)
    change_all(values)
    assert same(staged, many_kinds(1))
    assert staged["view"].data_ptr() == staged["base"].data_ptr() + 1000 * 4, "memory that was shared is not any more"
    assert staged["same"].data_ptr() == staged["base"].data_ptr()
    assert snapshot_memory()["in_use_bytes"] > 0
    del staged
    assert no_snapshot_is_left()
    stager.close()
    assert snapshot_memory()["touched_bytes"] == 0


def test_parameters_stay_what_they_are() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    staged = Stager().stage({"weight": weight, "plain": weight.detach(), "computed": weight * 2})
    assert [value.requires_grad for value in staged.values()] == [True, False, True]
    assert staged["computed"].eq(2).all()


def test_budget(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="budget_bytes"):
        Stager(budget_bytes=0)
    with pytest.raises(CheckpointError, match=r"1,000,000.*budget_bytes"):
        Stager(budget_bytes=1_000_000).stage(state(1))
    assert no_snapshot_is_left()


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@on_ranks(2, timeout=2 * BOUND)
def test_asynchronous_saves_of_dcp(checkpoint: Path, kind: AsyncCheckpointerType) -> None:
    stager, writer, planner = Stager(), StorageWriter(checkpoint), SavePlanner()
    for k in range(3):
        values = state_of_rank(k)
        answer = dcp.async_save(
            values, async_stager=stager, storage_writer=writer, planner=planner, async_checkpointer_type=kind
        )
        for value in values.values():
            if isinstance(value, DTensor):
                value.to_local().zero_()
            elif isinstance(value, torch.Tensor):
                value.zero_()
        assert isinstance(answer, Future)
        answer.result(BOUND)
    del answer
    assert no_snapshot_is_left()  # the executor's thread lets go of the state after its result is there
    assert same(load(checkpoint, whole_state(0)), whole_state(2))


@on_ranks(2)
def test_sharded_tensors(checkpoint: Path) -> None:
    rank = dist.get_rank()
    local = torch.full((3, 4), float(rank))
    value = init_from_local_shards([Shard.from_tensor_and_offsets(local, [3 * rank, 0], rank)], 6, 4)
    answer = dcp.async_save({"sharded": value}, async_stager=Stager(), storage_writer=StorageWriter(checkpoint))
    local.fill_(7)
    assert isinstance(answer, Future)
    answer.result(BOUND)
    found: dict[str, Any] = load(checkpoint, {"sharded": torch.zeros(6, 4)})
    assert found["sharded"][:3].eq(0).all() and found["sharded"][3:].eq(1).all()


def test_what_cannot_be_copied_is_named_by_the_planner(checkpoint: Path) -> None:
    with pytest.raises(CheckpointException, match="nowhere"):
        dcp.async_save(
            {"nowhere": torch.empty(3, device="meta")}, async_stager=Stager(), storage_writer=StorageWriter(checkpoint)
        ).result(BOUND)  # type: ignore[union-attr]
    vescale_ckpt.save(checkpoint, {"step": 1})
