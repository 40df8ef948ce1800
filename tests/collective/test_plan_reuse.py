"""Planners that are used again: in two groups, in many forms, with other memory, writers and collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.saves import load_blank, stock_load
from harness.states import assert_same, blank
from test_planning import BOUND, WAYS, everything_in, replicated, save
from torch.distributed.checkpoint.api import CheckpointException

from vescale_ckpt import LoadPlanner, SavePlanner, StorageReader, StorageWriter


@pytest.mark.parametrize("members", [([0, 1], [0, 2]), ([0, 2], [1, 2])], ids=["one coordinator", "two coordinators"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(3, timeout=BOUND)
def test_two_groups(tmp_path: Path, way: str, members: tuple[list[int], list[int]]) -> None:
    """One planner on each rank saves in two groups. No rank names a plan, or gets a part of one, that it was given in
    the other group for the same form of the state."""
    groups = [dist.new_group(ranks) for ranks in members]
    planner = SavePlanner()

    def step(k: int, group: int, forms: int) -> None:
        if dist.get_rank(groups[group]) >= 0:
            state: dict[str, Any] = {"table": torch.arange(1_500_000.0).view(1500, 1000) + k}
            if forms == 1 and dist.get_rank(groups[group]) == 1:
                state["more"] = torch.arange(3_000_000.0).view(3000, 1000) + k
            save(way, f"{tmp_path}/{k}", state, planner, groups[group])
            target, reader = blank(state), StorageReader(f"{tmp_path}/{k}")
            dcp.load(target, storage_reader=reader, planner=LoadPlanner(), process_group=groups[group])
            assert_same(target, state)
        dist.barrier()

    for k, (group, form) in enumerate([(0, 0), (1, 1), (1, 0), (0, 0), (1, 0), (0, 0)]):
        step(k, group, form)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3, timeout=BOUND)
def test_more_plans_than_are_kept(tmp_path: Path, way: str) -> None:
    """More plans than are kept, of fewer forms on each rank: ranks must not name plans that the coordinator forgot."""
    planner = SavePlanner()
    rank = dist.get_rank()
    forms = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 0), (0, 0)]
    for k, form in enumerate(forms):
        state = {"shared": torch.full((7,), float(k))}
        if rank:
            state[f"of {rank}"] = torch.full((3 + form[rank - 1],), float(k))
        save(way, f"{tmp_path}/{k % 2}", state, planner)
        assert_same(load_blank(f"{tmp_path}/{k % 2}", state), state)


@on_ranks(2, timeout=BOUND)
def test_one_planner_for_saves_of_all_ranks_and_of_each_alone(tmp_path: Path) -> None:
    planner = SavePlanner()
    rank = dist.get_rank()
    for k in range(4):
        state = replicated(k)
        path = f"{tmp_path}/{k}" + (f" of {rank}" if k % 2 else "")
        dcp.save(state, storage_writer=StorageWriter(path), planner=planner, no_dist=bool(k % 2))
        assert_same(load_blank(path, state), state)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, timeout=BOUND)
def test_tensors_that_lie_elsewhere_at_each_save(tmp_path: Path, way: str) -> None:
    """What a plan does not know: where and how tensors lie."""
    planner = SavePlanner()
    shape = (40, 30)
    values = torch.arange(1200.0).view(shape)
    complex_values = torch.complex(values, -values)
    forms: list[Callable[[], torch.Tensor]] = [
        lambda: complex_values.clone(),
        lambda: complex_values.t().contiguous().t(),
        lambda: complex_values.conj(),
        lambda: torch.zeros(shape, dtype=torch.complex64),
        lambda: complex_values[:1].expand(shape),
        lambda: torch.cat([complex_values, complex_values])[::2],
    ]
    tied = torch.ones(5)
    for k, form in enumerate(forms * 2):
        tensor = form()
        if k >= len(forms) and dist.get_rank() == 0:  # replicas that lie differently on each rank
            tensor = tensor.clone()
        tied += 1
        imaginary = complex_values.conj().imag if k % 2 else complex_values.imag
        state = {"a": tensor, "tied": tied, "tied too": tied, "imaginary": imaginary}
        save(way, f"{tmp_path}/{k % 2}", state, planner)
        target = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
        dcp.load(target, storage_reader=StorageReader(f"{tmp_path}/{k % 2}"), planner=LoadPlanner())
        for key, value in state.items():
            assert torch.equal(target[key], value), (k, key)


class _ItemsOnly(SavePlanner):
    """Asks for DCP's items, on the ranks that use it."""

    def create_local_plan(self) -> Any:
        return super().create_local_plan()


@pytest.mark.parametrize(("way", "asks"), [("dcp", 0), ("ours", 1)])
@on_ranks(2, timeout=BOUND)
def test_a_subclass_on_one_rank(tmp_path: Path, way: str, asks: int) -> None:
    planner = _ItemsOnly() if dist.get_rank() == asks else SavePlanner()
    for k in range(3):
        state = replicated(k)
        state[f"of {dist.get_rank()}"] = torch.full((4,), float(k))
        save(way, f"{tmp_path}/{k}", state, planner)
        assert_same(load_blank(f"{tmp_path}/{k}", state), state)
        assert_same(stock_load(f"{tmp_path}/{k}", state), state)


# --- Load planners


@on_ranks(2, timeout=BOUND)
def test_a_load_planner_is_used_again(tmp_path: Path) -> None:
    planner = LoadPlanner()
    states = []
    for k in range(3):
        state = replicated(k)
        if k == 2:
            state["table"] = state["table"].int()
        states.append(state)
        save("ours", f"{tmp_path}/{k}", state)
    for k in (0, 1, 0, 2, 0, 1):
        target = replicated(5)
        target["table"] = torch.zeros(states[k]["table"].shape, dtype=states[k]["table"].dtype)
        dcp.load(target, storage_reader=StorageReader(f"{tmp_path}/{k}"), planner=planner)
        assert_same(target, states[k])
    with pytest.raises(CheckpointException) as caught:
        dcp.load(replicated(5), storage_reader=StorageReader(f"{tmp_path}/2"), planner=planner)
    assert "dtype" in everything_in(caught.value)
    # Overwritten between loads, and other memory, other layout
    for k in (1, 2, 3):
        state = replicated(k)
        save("ours", f"{tmp_path}/0", state)
        target = replicated(7)
        target["table"] = torch.zeros(1000, 1500).t() if k == 2 else torch.zeros(1500, 2000)[:, ::2]
        dcp.load(target, storage_reader=StorageReader(f"{tmp_path}/0"), planner=planner)
        assert torch.equal(target["table"], state["table"])
        target["table"] = state["table"]
        assert_same(target, state)
    planner.allow_cast = True
    target = replicated(5)
    target["table"] = target["table"].double()
    dcp.load(target, storage_reader=StorageReader(f"{tmp_path}/0"), planner=planner)
    assert torch.equal(target["table"], replicated(3)["table"].double())
    partial = LoadPlanner(allow_partial_load=True)
    for _ in range(2):
        target = {"step": 0, "new": torch.full((2,), 4.0), "missing": 3, "scalar": torch.zeros(())}
        dcp.load(target, storage_reader=StorageReader(f"{tmp_path}/0"), planner=partial)
        assert target["step"] == 3 and target["missing"] == 3 and torch.equal(target["new"], torch.full((2,), 4.0))
        assert target["scalar"] == 3.0
    with pytest.raises(CheckpointException) as caught:
        mine = {"step": 0, **({"absent": 1} if dist.get_rank() else {})}
        dcp.load(mine, storage_reader=StorageReader(f"{tmp_path}/0"), planner=planner)
    assert "1 key missing" in everything_in(caught.value)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"step": torch.ones(2)}, storage_reader=StorageReader(f"{tmp_path}/0"), planner=planner)
    assert "an object" in everything_in(caught.value)
    meta = {"table": torch.empty(1500, 1000, device="meta")}
    dcp.load(meta, storage_reader=StorageReader(f"{tmp_path}/0"), planner=planner)
