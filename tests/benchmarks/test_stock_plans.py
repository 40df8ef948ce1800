"""What planning is measured against: stock gets the items that it would make itself, and is known to be uneven."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.inventories import inventory_of, kinds, tensors
from harness.ranks import forked
from harness.states import real_state
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.planning import balance, stock
from benchmarks.planning.models import Entry, with_adam
from benchmarks.planning.simulated_job import Parallelism, SimulatedState, bytes_by_rank, planned

ENTRIES = with_adam(
    [
        Entry("embed_tokens.weight", (30, 8), torch.bfloat16),
        Entry("layers.0.q_proj.weight", (16, 8), torch.bfloat16),
        Entry("layers.0.o_proj.weight", (8, 16), torch.bfloat16),
        Entry("layers.0.norm.weight", (8,), torch.bfloat16),
    ]
)


@forked
def test_stock_gets_the_items_that_it_makes_itself() -> None:
    """Of one rank, what stock plans of its state and what we make of its inventory; in a process of its own."""
    parallelism = Parallelism(8, fsdp=2, tensor=2)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    state = real_state(ENTRIES, parallelism)
    inventory = inventory_of(state)
    simulated = SimulatedState(ENTRIES, parallelism).inventory(5)
    assert kinds(inventory) == kinds(simulated)
    assert tensors(inventory) == tensors(simulated)
    real, ours = create_default_local_save_plan(state, False).items, stock.save_plan(inventory)
    assert len(real) == len(ENTRIES)
    assert [item.index for item in ours.items] == [item.index for item in real]
    assert [item.type for item in ours.items] == [item.type for item in real]
    assert [item.tensor_data for item in ours.items] == [item.tensor_data for item in real]
    assert ours.planner_data == {entry.name: (entry.name,) for entry in ENTRIES}


def test_stock_writes_all_bytes_once() -> None:
    state = SimulatedState(ENTRIES, Parallelism(4, fsdp=2))
    inventories = [state.inventory(rank) for rank in range(4)]
    _, parts = planned(inventories, "balanced")
    assert sum(stock.bytes_by_rank(inventories)) == sum(bytes_by_rank(inventories, parts))


def _small(case: balance.Case) -> bool:
    return case.parallelism.ranks * len(case.entries) < 20_000


@pytest.mark.parametrize("case", [case for case in balance.cases() if _small(case)], ids=lambda case: case.name)
def test_small_cases_are_balanced(case: balance.Case) -> None:
    ours, of_stock = balance.balance(case)
    assert 1 <= ours <= 1.02
    assert of_stock >= ours - 0.01
