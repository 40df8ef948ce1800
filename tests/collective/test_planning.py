"""Plans over several ranks, through `dcp.save` and `vescale_ckpt.save`: once each byte, kept from save to save, and
never for a state they were not made for."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.files import data_files
from harness.logs import logged
from harness.ranks import on_ranks, run_ranks
from harness.saves import load_blank, stock_load
from harness.states import assert_same
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt
from vescale_ckpt import CheckpointError, LoadPlanner, PerRank, SavePlanner, StorageReader, StorageWriter

BOUND = 120.0  # seconds after which a run of ranks counts as hung
WAYS = ("dcp", "ours")


def save(way: str, path: str, state: dict[str, Any], planner: SavePlanner | None = None, group: Any = None) -> None:
    if way == "dcp":
        dcp.save(state, storage_writer=StorageWriter(path), planner=planner or SavePlanner(), process_group=group)
    else:
        with nullcontext() if planner is None else steps.planned_by(planner):
            vescale_ckpt.save(path, state, process_group=group, async_checkpoint=way == "async").result()


def everything_in(error: BaseException) -> str:
    """Its text, and those of the errors that DCP gathered in it."""
    inside = error.failures.values() if isinstance(error, CheckpointException) else ()
    return "; ".join([str(error), *(str(failure[0]) for failure in inside)])


def replicated(k: int) -> dict[str, Any]:
    """Large enough to be cut in pieces, and small; views, and all kinds of objects."""
    return {
        "table": torch.arange(1_500_000, dtype=torch.float32).view(1500, 1000) + k,
        "small": [torch.full((100 + i,), k + i, dtype=torch.bfloat16) for i in range(20)],
        "transposed": torch.arange(600_000.0).view(1000, 600).t() + k,
        "scalar": torch.tensor(float(k)),
        "empty": torch.empty(0, 3),
        "step": k,
        "nested": {"text": "x" * k, "list": [1, {"a": k}]},
    }


# --- Each byte once, evenly


def _replicas(way: str, path: str) -> int:
    state = replicated(1)
    save(way, path, state)
    assert_same(load_blank(path, state), state)
    assert_same(stock_load(path, state), state)
    mine = [name for name in os.listdir(path) if name.startswith(f"__{dist.get_rank()}_")]
    return sum(os.path.getsize(os.path.join(path, name)) for name in mine)


@pytest.mark.parametrize(("way", "world_size"), [("dcp", 4), ("ours", 2)])
def test_replicas_write_evenly_and_once(checkpoint: Path, way: str, world_size: int) -> None:
    sizes = run_ranks(world_size, _replicas, way, str(checkpoint), timeout=BOUND)
    needed = 4 * (1_500_000 + 600_000)
    assert needed <= sum(sizes) < 1.2 * needed
    assert max(sizes) < 1.25 * sum(sizes) / world_size


# --- Kept plans


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, timeout=BOUND)
def test_a_kept_plan_writes_the_values_of_now(tmp_path: Path, way: str) -> None:
    planner = SavePlanner()
    made = steps.count_plans(planner)
    for k in range(1, 5):
        state = replicated(k)
        save(way, f"{tmp_path}/{k % 2}", state, planner)
        assert_same(load_blank(f"{tmp_path}/{k % 2}", state), state)
    assert made == ([2], [])[dist.get_rank()]  # one plan, by the coordinator, for four saves


def _changes() -> list[tuple[str, Callable[[dict[str, Any]], Any]]]:
    def rename(state: dict[str, Any]) -> None:
        state["other"] = state.pop("a")

    return [
        ("dtype", lambda state: state.update(a=state["a"].to(torch.int32))),
        ("shape", lambda state: state.update(a=state["a"][:40])),
        ("name", rename),
        ("new object", lambda state: state.update(new={"x": 1})),
        ("object instead of a tensor", lambda state: state.update(a=3)),
        ("order", lambda state: state.update(a=state.pop("a"))),
    ]


CHANGES = [
    *(
        (name, WAYS[number % 2], [2, 2]) for number, (name, _) in enumerate(_changes())
    ),  # the third finds the first plan
    # In the third save the other rank names the plan of the second.
    *((f"only on rank {rank}", way, [2, 2, 2]) for way, rank in (("dcp", 1), ("ours", 0))),
]


@pytest.mark.parametrize(("change", "way", "plans"), CHANGES)
@on_ranks(2, timeout=BOUND)
def test_any_change_makes_a_new_plan(tmp_path: Path, change: str, way: str, plans: list[int]) -> None:
    planner = SavePlanner()
    made = steps.count_plans(planner)
    for k in range(3):
        state: dict[str, Any] = {
            "a": torch.arange(4000, dtype=torch.float32).view(50, 80) + k,
            "b": torch.full((3,), float(k)),
            f"of rank {dist.get_rank()}": torch.full((5,), float(k)),
        }
        if k == 1 and change == f"only on rank {dist.get_rank()}":
            state["only here"] = torch.full((4,), 2.0)
        elif k == 1 and not change.startswith("only"):
            dict(_changes())[change](state)
        save(way, f"{tmp_path}/{k}", state, planner)
        with torch.no_grad():
            assert_same(load_blank(f"{tmp_path}/{k}", state), state)
    assert made == (plans, [])[dist.get_rank()]


@pytest.mark.parametrize(("ways", "keeping"), [(("dcp",), 0), (("ours",), 1), (("ours", "dcp"), 0)])
@on_ranks(2, timeout=BOUND)
def test_ranks_of_which_one_keeps_plans_plan_each_time(tmp_path: Path, ways: tuple[str, ...], keeping: int) -> None:
    planner = SavePlanner(enable_plan_caching=dist.get_rank() == keeping)
    made = steps.count_plans(planner)
    for k in range(4):
        state = replicated(k)
        save(ways[k % len(ways)], f"{tmp_path}/{k}", state, planner)
        assert_same(load_blank(f"{tmp_path}/{k}", state), state)
    assert made == ([2, 2, 2, 2], [])[dist.get_rank()]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, timeout=BOUND)
def test_ranks_that_disagree_are_told_and_the_next_save_goes_on(tmp_path: Path, way: str) -> None:
    planner = SavePlanner()
    state = replicated(1)
    save(way, f"{tmp_path}/1", state, planner)
    broken = replicated(2)
    if dist.get_rank() == 1:
        broken["table"] = broken["table"][:, :-1].contiguous()
    with pytest.raises((CheckpointError, CheckpointException)) as caught:
        save(way, f"{tmp_path}/2", broken, planner)
    assert "table: rank 0 has shape (1500, 1000), rank 1 has (1500, 999)" in everything_in(caught.value)
    assert not os.path.exists(f"{tmp_path}/2/.metadata") and not data_files(tmp_path / "2")
    for k in (3, 4):
        state = replicated(k)
        save(way, f"{tmp_path}/{k}", state, planner)
        assert_same(load_blank(f"{tmp_path}/{k}", state), state)


# --- Objects


def _per_rank(way: str, path: str) -> None:
    rank = dist.get_rank()
    save(way, path, {"rng": PerRank({"seed": 100 + rank}), "step": 3, "n": {"t": [PerRank(torch.full((3,), rank))]}})
    target = {"rng": PerRank(None), "step": 0, "n": {"t": [PerRank(None)]}}
    dcp.load(target, storage_reader=StorageReader(path), planner=LoadPlanner())
    assert target["rng"].obj == {"seed": 100 + rank} and target["step"] == 3
    assert torch.equal(target["n"]["t"][0].obj, torch.full((3,), rank))


def _per_rank_elsewhere(path: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"rng": PerRank(None)}, storage_reader=StorageReader(path), planner=LoadPlanner())
    assert "rng: the state to load into has state of 4 ranks, the checkpoint has that of 2" in everything_in(
        caught.value
    )
    seen: list[Any] = []

    def reshard(values: list[Any], rank: int, size: int) -> Any:
        seen.append((rank, size))
        return [value["seed"] for value in values]

    target = {"rng": PerRank(None, reshard=reshard)}
    dcp.load(target, storage_reader=StorageReader(path), planner=LoadPlanner())
    assert target["rng"].obj == [100, 101] and seen == [(rank, size)]


@pytest.mark.parametrize("way", WAYS)
def test_state_of_each_rank_comes_back_to_it(checkpoint: Path, way: str) -> None:
    run_ranks(2, _per_rank, way, str(checkpoint), timeout=BOUND)
    run_ranks(4, _per_rank_elsewhere, str(checkpoint), timeout=BOUND)


@on_ranks(2, timeout=BOUND)
def test_state_of_each_rank_in_a_tuple_is_refused(checkpoint: Path) -> None:
    rank = dist.get_rank()
    for state in ({"opt": {"rng": (1, PerRank(rank))}}, {"opt": {"rng": [5, (1, {"x": [PerRank(rank)]})]}}):
        with pytest.raises((CheckpointError, CheckpointException)) as caught:
            save("ours", checkpoint, state)
        assert "opt.rng: a PerRank is part of a value that is saved as one object" in everything_in(caught.value)
        assert not os.path.exists(f"{checkpoint}/.metadata")
    endless: list[Any] = [1]
    endless.append((endless,))
    save("ours", checkpoint, {"opt": {"rng": (1, 2)}, "tuples": [(1, endless)]})
    with pytest.raises(CheckpointException) as refused:
        target = {"opt": {"rng": (1, PerRank(rank))}}
        dcp.load(target, storage_reader=StorageReader(checkpoint), planner=LoadPlanner())
    assert "opt.rng: a PerRank is part of" in everything_in(refused.value)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, timeout=BOUND)
def test_objects_that_differ_from_rank_to_rank_are_warned_of(checkpoint: Path, way: str) -> None:
    with logged(logging.WARNING) as texts:
        save(way, checkpoint, {"same": {"x": 1}, "rng": {"seed": dist.get_rank()}, "a": torch.ones(2)})
    told = "".join(texts)
    assert len(texts) == (dist.get_rank() == 0) and "same" not in told
    assert dist.get_rank() or ("rng.seed (ranks 0 and 1)" in told and "PerRank" in told)


# --- The metadata that dcp.save returns, what a writer adds to it, and an index beside that of another save


def _saved(path: Path, k: int, **options: Any) -> dict[str, Any]:
    state = replicated(k)
    dcp.save(state, storage_writer=StorageWriter(path, **options), planner=SavePlanner())
    return state


def test_an_index_of_another_save(tmp_path: Path) -> None:
    first, second = _saved(tmp_path / "1", 1), _saved(tmp_path / "2", 2)
    shutil.copy(tmp_path / "1" / ".metadata.index", tmp_path / "2" / ".metadata.index")
    assert_same(load_blank(str(tmp_path / "2"), second), second)
    shutil.copytree(tmp_path / "1", tmp_path / "2", dirs_exist_ok=True)
    assert_same(load_blank(str(tmp_path / "2"), first), first)


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
