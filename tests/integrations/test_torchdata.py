"""torchdata's `StatefulDataLoader` in a checkpoint: each rank goes on with its own next batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

import vescale_ckpt
from vescale_ckpt import IncompatibleStateError, PerRank

pytest.importorskip("torchdata")


def _loader(workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = torch.arange(60)[dist.get_rank() :: dist.get_world_size()]
    return StatefulDataLoader(data, batch_size=3, shuffle=True, num_workers=workers)


def _save(directory: Path, workers: int) -> list[Any]:
    torch.manual_seed(dist.get_rank())
    loader = _loader(workers)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    vescale_ckpt.save(directory, {"data": PerRank(loader)}, timeout=60)
    return [batch.tolist() for batch in batches]


def _load(directory: Path, workers: int) -> list[Any]:
    loader = _loader(workers)
    vescale_ckpt.load(directory, {"data": PerRank(loader)}, timeout=60)
    return [batch.tolist() for batch in loader]


def test_each_rank_goes_on_with_its_next_batch(tmp_path: Path) -> None:
    left = run_ranks(2, _save, tmp_path, 0)
    assert run_ranks(2, _load, tmp_path, 0) == left
    assert left[0] != left[1] and all(len(batches) == 7 for batches in left)


def _load_on_more(directory: Path) -> str:
    with pytest.raises(IncompatibleStateError) as raised:
        _load(directory, 0)
    return str(raised.value)


def test_another_number_of_ranks_needs_a_function(tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path, 0)
    assert all("PerRank takes a function" in text for text in run_ranks(3, _load_on_more, tmp_path))
