"""Packed plans looked at as DCP's lists of items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from vescale_ckpt import LoadPlanner, SavePlanner, StorageReader, save
from vescale_ckpt._state import describe


class Counting:
    """A module whose `inventory_items` is counted."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def inventory_items(self, inventory: bytes) -> Any:
        self.calls += 1
        return self.module.inventory_items(inventory)


@pytest.fixture
def unpacking(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(describe._C)
    monkeypatch.setattr(describe, "_C", counting)
    return counting


def test_a_stock_writer_has_the_inventory_unpacked_once(checkpoint: Path, unpacking: Counting) -> None:
    state = {f"layer.{number}": torch.full((3,), float(number)) for number in range(50)}
    dcp.save(state, storage_writer=FileSystemWriter(checkpoint), planner=SavePlanner())
    assert unpacking.calls == 1
    loaded = {name: torch.zeros(3) for name in state}
    dcp.load(loaded, checkpoint_id=checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_look_at_a_load_plan_has_the_inventory_unpacked_once(checkpoint: Path, unpacking: Counting) -> None:
    state = {f"layer.{number}": torch.zeros(3) for number in range(50)}
    save(checkpoint, state)
    reader, planner = StorageReader(checkpoint), LoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    items = list(planner.create_local_plan().items)
    assert [item.dest_index.fqn for item in items] == list(state)
    assert unpacking.calls == 1
