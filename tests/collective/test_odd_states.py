"""States at the edges: empty ones, odd keys, many objects, values of each rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.saves import load_blank, stock_load
from harness.states import assert_same
from test_planning import BOUND, WAYS, everything_in, save
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt
from vescale_ckpt import CheckpointError, LoadPlanner, PerRank, SavePlanner, StorageReader, StorageWriter

ERRORS = (CheckpointError, CheckpointException)


CASES = [
    "empty", "empty on rank 0", "empty on rank 1", "objects only", "empty containers", "empty tensors", "keys",
    "many objects",
]  # fmt: skip


@pytest.mark.parametrize(("case", "way"), [(case, WAYS[number % 2]) for number, case in enumerate(CASES)])
@on_ranks(2, timeout=BOUND)
def test_edges(tmp_path: Path, way: str, case: str) -> None:
    rank = dist.get_rank()
    planner = SavePlanner()
    states: dict[str, Callable[[int], dict[str, Any]]] = {
        "empty": lambda k: {},
        "empty on rank 0": lambda k: {} if rank == 0 else {"a": torch.full((5,), float(k)), "o": k},
        "empty on rank 1": lambda k: {} if rank == 1 else {"a": torch.full((5,), float(k)), "o": k},
        "objects only": lambda k: {"o": k, "t": (1, k), "n": None},
        "empty containers": lambda k: {"d": {}, "l": [], "e": {"f": {}}, "k": k},
        "empty tensors": lambda k: {"a": torch.empty(0), "b": torch.empty(3, 0, 2), f"r{rank}": torch.empty(0)},
        "keys": lambda k: {
            "": torch.full((2,), float(k)), "\n": k, "a\0b": torch.ones(2) * k, "é/..": k, "\ud800": torch.ones(1) * k,
            "x" * 5000: k, "__0_0.distcp": torch.ones(2) * k, "'\"\\": {"%s{}": torch.ones(3) * k, "n": {"7": k}},
            " ": k, "\u202e": torch.zeros(1) + k,
        },
        "many objects": lambda k: {f"o{i}": {"i": i + k} for i in range(600)},
    }  # fmt: skip
    for k in range(3):
        state = states[case](k)
        save(way, f"{tmp_path}/{k % 2}", state, planner)
        for loaded in (load_blank(f"{tmp_path}/{k % 2}", state), stock_load(f"{tmp_path}/{k % 2}", state)):
            assert_same(loaded, state)


def test_per_rank_state_whose_name_is_taken(tmp_path: Path) -> None:
    for state in (
        {"a": PerRank(1), "a.rank_0_of_1": 2},
        {"a.rank_0_of_1": 2, "a": PerRank(1)},
        {"a": PerRank(1), "a.rank_0_of_1": torch.ones(2)},
    ):
        with pytest.raises((ValueError, *ERRORS)) as caught:
            vescale_ckpt.save(tmp_path / "c", state)
        assert "a.rank_0_of_1" in everything_in(caught.value)


class _MyPerRank(PerRank):
    pass


def test_a_subclass_of_per_rank_and_states_that_stay_nested(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "c", {"a": _MyPerRank(1)})
    target = {"a": _MyPerRank(0)}
    dcp.load(target, storage_reader=StorageReader(tmp_path / "c"), planner=LoadPlanner())
    assert target["a"].obj == 1
    writer, planner = StorageWriter(tmp_path / "d"), SavePlanner(flatten_state_dict=False)
    dcp.save({"a": PerRank(1)}, storage_writer=writer, planner=planner)
    nested = {"a": PerRank(0)}
    dcp.load(nested, storage_reader=StorageReader(tmp_path / "d"), planner=LoadPlanner(flatten_state_dict=False))
    assert nested["a"].obj == 1


@on_ranks(2, timeout=BOUND)
def test_per_rank_state_beside_a_tensor_that_has_no_memory_yet(checkpoint: Path) -> None:
    save("ours", checkpoint, {"n": {"rng": PerRank(dist.get_rank() + 5)}, "w": torch.ones(3)})
    target: dict[str, Any] = {"n": {"rng": PerRank(0)}, "w": torch.empty(3, device="meta")}
    rng = target["n"]["rng"]
    dcp.load(target, storage_reader=StorageReader(checkpoint), planner=LoadPlanner())
    assert target["n"]["rng"] is rng and rng.obj == dist.get_rank() + 5 and torch.equal(target["w"], torch.ones(3))


def test_a_state_is_not_kept_after_its_save(tmp_path: Path) -> None:
    state = {"a": torch.ones(3)}
    gone = weakref.ref(state["a"])
    vescale_ckpt.save(tmp_path / "c", state)
    del state
    gc.collect()
    assert gone() is None
