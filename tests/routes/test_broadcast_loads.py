"""Ranks that read for each other inside plain `dcp.load`, of any checkpoint; metadata read once; what is not shared."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.files import drop_from_cache, flip
from harness.ranks import on_ranks, run_ranks
from harness.saves import save_by
from harness.states import assert_same, blank, numbers, sharded
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, LoadPlanner, PerRank, StorageReader
from vescale_ckpt._checkpoint.native import metadata_file
from vescale_ckpt._engine import _C
from vescale_ckpt._routes.broadcast_load import BroadcastLoad
from vescale_ckpt.settings import ranks_of_this_node

FOREVER = 60.0
PLANNERS = (DefaultLoadPlanner, LoadPlanner)


def _full() -> dict[str, Any]:
    return {
        "w": numbers(2048, 512),
        "nested": {"v": numbers(300, 7, dtype=torch.int16), "step": 7},
        "few": [numbers(i + 1, 3) for i in range(5)],
    }


def _load_by_reader(
    directory: Path, state: dict[str, Any], planner: Any = None, way: Any = True, **options: Any
) -> vescale_ckpt.LoadStats:
    reader = StorageReader(directory, broadcast_checkpoint=way)
    dcp.load(state, storage_reader=reader, planner=planner, **options)
    assert reader.last_stats is not None
    return reader.last_stats


# --- dcp.load


def _load_by_dcp(directory: Path, by: str) -> list[tuple[int, int]]:
    """Bytes read and needed with each planner, of replicas, then of rows loaded as columns."""
    full = _full()
    rows = sharded(full["w"], Shard(0))
    save_by(by, directory, {**full, "rows": rows})
    results = []
    for planner in PLANNERS:
        state, columns = blank(full), sharded(torch.zeros_like(full["w"]), Shard(1))
        for target in (state, {"rows": columns}):
            stats = _load_by_reader(directory, target, planner())
            results.append((stats.read_bytes, stats.shared_bytes))
        assert_same(state, full)
        assert_same(columns.to_local(), sharded(full["w"], Shard(1)).to_local())
    return results


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_dcp_load_reads_each_byte_once(checkpoint: Path, by: str) -> None:
    full = _full()
    w = full["w"].nbytes
    replicated = w + full["nested"]["v"].nbytes + sum(tensor.nbytes for tensor in full["few"])
    results = run_ranks(4, _load_by_dcp, checkpoint, by)
    for number, stored in enumerate([replicated, w, replicated, w]):
        read, shared = (sum(result[number][column] for result in results) for column in (0, 1))
        assert read <= 1.05 * stored, number
        assert shared == (4 * stored if stored == replicated else stored), number


def _in_parts(directory: Path) -> tuple[int, int]:
    """The parts in which a load of replicas and of shards is planned, and the bytes that this rank reads."""
    full = {f"w{number}": numbers(384, 1024) + number for number in range(16)}
    vescale_ckpt.save(directory, full)
    state = {
        name: sharded(torch.zeros_like(full[name]), Shard(1)) if name == "w3" else blank(full[name]) for name in full
    }
    with (
        steps.limit("bytes gathered to plan one part of a load", 1000),
        steps.limit("bytes of a range of a file that is in one part of a load", 1 << 20),
        mock.patch.object(_C, "plan_routes", wraps=_C.plan_routes) as planned,
    ):
        stats = vescale_ckpt.load(directory, state, broadcast_checkpoint=True, timeout=FOREVER).stats
    assert_same(state.pop("w3").to_local(), sharded(full.pop("w3"), Shard(1)).to_local())
    assert_same(state, full)
    return planned.call_count, stats.read_bytes


def test_a_load_is_planned_in_parts_that_are_even_together(checkpoint: Path) -> None:
    """Each part alone is too small to be cut evenly over the ranks."""
    calls, read = zip(*run_ranks(4, _in_parts, checkpoint), strict=True)
    assert sum(calls) > 3
    assert sum(read) <= 1.1 * 16 * 384 * 1024 * 4
    assert max(read) <= sum(read) / 4 + (2 << 20), read


@on_ranks(2)
def test_what_not_all_ranks_load_is_not_shared(checkpoint: Path) -> None:
    """Loads in which not all ranks of the reader's group take part share nothing, and wait for nobody."""
    full = _full()
    save_by("ours", checkpoint, full)
    texts: list[str] = []
    with mock.patch.object(BroadcastLoad, "begin", side_effect=AssertionError("nothing is to be shared")):
        for options in ({"no_dist": True}, {"process_group": dist.new_subgroups(1)[0]}):
            if "no_dist" not in options or dist.get_rank() == 0:
                state = blank(full)
                _load_by_reader(checkpoint, state, LoadPlanner(), **options)
                assert_same(state, full)
        state = blank(full)
        reader = StorageReader(checkpoint, broadcast_checkpoint=True, process_group=dist.new_subgroups(1)[0])
        with mock.patch(
            "vescale_ckpt._dcp.storage_reader.logger.warning", side_effect=lambda text, *a: texts.append(text % a)
        ):
            dcp.load(state, storage_reader=reader)
        assert_same(state, full)
    if dist.get_rank():
        assert not texts
    else:
        assert len(texts) == 1 and "2 ranks load, but the reader's process group has 1" in texts[0]


class _Committing(DefaultLoadPlanner):
    """Hands out memory of its own, as planners that convert do."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.target = super().resolve_tensor(read_item)
        return torch.empty_like(self.target)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


@on_ranks(2)
def test_planners_that_commit_read_for_themselves(checkpoint: Path) -> None:
    full = _full()
    save_by("ours", checkpoint, full)
    state = blank(full)
    assert _load_by_reader(checkpoint, state, _Committing()).shared_bytes == 0
    assert_same(state, full)


@on_ranks(4)
def test_damage_is_raised_on_all_ranks(checkpoint: Path) -> None:
    full = _full()
    save_by("ours", checkpoint, full)
    dist.barrier()
    if dist.get_rank() == 0:
        file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
        flip(file)
    dist.barrier()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        _load_by_reader(checkpoint, blank(full))
    errors = [error for error, _ in caught.value.failures.values()]
    assert errors and all(isinstance(error, CorruptCheckpointError) for error in errors)
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, [str(error) for error in errors])
    assert told == [told[0]] * 4 and "checksum mismatch" in told[0][0]


@pytest.mark.parametrize("variable", ["MEMORY_BYTES", "NODE"])
@on_ranks(2)
def test_a_bad_setting_of_one_rank_is_told_to_all(checkpoint: Path, variable: str) -> None:
    name = f"VESCALE_CKPT_{variable}"
    full = _full()
    save_by("ours", checkpoint, full)
    if dist.get_rank() == 1:
        os.environ[name] = "wrong"
    with pytest.raises(dcp.api.CheckpointException) as caught:
        _load_by_reader(checkpoint, blank(full))
    text = str(caught.value)
    assert "ranks:dict_keys([1])" in text and f"ValueError: {name}: expected" in text and "got 'wrong'" in text, text


@on_ranks(2)
def test_in_which_way_ranks_read_is_the_coordinators_to_say(checkpoint: Path) -> None:
    full = _full()
    save_by("ours", checkpoint, full)
    shares = []
    for ways in ((True, False), (False, True), (True, "auto")):
        state = blank(full)
        shares.append(_load_by_reader(checkpoint, state, way=ways[dist.get_rank()]).shared_bytes > 0)
        assert_same(state, full)
    assert shares == [True, False, True]


# --- Objects


@pytest.mark.parametrize(
    ("by", "planner"), [("ours", None), ("ours", LoadPlanner), ("stock", None), ("stock", DefaultLoadPlanner)]
)
@on_ranks(2)
def test_objects_that_all_want_are_read_once(checkpoint: Path, by: str, planner: Callable[[], Any] | None) -> None:
    """How many objects this rank has read, and how many it has loaded."""
    rank = dist.get_rank()
    objects = {f"object{i}": "x" * i for i in range(5)}
    own = {"own": PerRank(f"of {rank}")} if by == "ours" else {}
    save_by(by, checkpoint, {"w": numbers(100), **objects, **own})
    state: dict[str, Any] = {"w": torch.zeros(100), **dict.fromkeys(objects), **({"own": PerRank(None)} if own else {})}
    with mock.patch.object(_C, "read_objects", wraps=_C.read_objects) as read:
        if planner is None:
            loaded = vescale_ckpt.load(checkpoint, state, broadcast_checkpoint=True, timeout=FOREVER).stats.objects
        else:
            loaded = _load_by_reader(checkpoint, state, planner()).objects
    assert {name: state[name] for name in objects} == objects
    assert not own or state["own"].obj == f"of {rank}"
    count = sum(len(call.args[1]) // 3 for call in read.call_args_list)
    assert (count, loaded) == (len(own) if rank else 5 + len(own), 5 + len(own))


# --- Each for itself


def _through_the_cache(directory: Path, by: str) -> dict[str, tuple[int, int]]:
    """Bytes of each load that went past the page cache, and in all, when nothing is shared."""
    w = numbers(4096, 512)
    save_by(by, directory, {"w": w})
    results = {}
    for name, ranks_here in (("replicas", "2"), ("rows", "2"), ("replicas", "1")):
        os.environ["LOCAL_WORLD_SIZE"] = ranks_here
        dist.barrier()
        for path in directory.glob("*.distcp"):
            drop_from_cache(path)
        dist.barrier()
        zeros = torch.zeros_like(w)
        target: Any = sharded(zeros, Shard(0)) if name == "rows" else zeros
        stats = _load_by_reader(directory, {"w": target}, LoadPlanner(), False)
        results[f"{name} {ranks_here}"] = (stats.direct_bytes, stats.read_bytes)
        wanted = sharded(w, Shard(0)).to_local() if name == "rows" else w
        assert_same(target.to_local() if name == "rows" else target, wanted)
    return results


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_ranks_of_a_node_that_want_the_same_read_through_its_page_cache(checkpoint: Path, by: str) -> None:
    for results in run_ranks(2, _through_the_cache, checkpoint, by):
        direct, everything = zip(*results.values(), strict=True)
        assert direct[0] == 0 < everything[0]
        if direct[2] == 0:
            pytest.skip("files are in the page cache, or cannot be read past it")
        assert direct[2] > 0.9 * everything[2]
        # Parts of what stock DCP wrote can only be checked by reading all of it: then rows are wanted by all, too.
        assert direct[1] == 0 if by == "stock" else direct[1] > 0.9 * everything[1]


@pytest.mark.parametrize(("said", "ranks"), [("8", 8), ("", 3), ("0", 3), ("-1", 3), ("two", 3), (None, 3)])
def test_who_started_the_ranks_says_how_many_are_on_a_node(
    said: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert ranks_of_this_node(3) == ranks


# --- Metadata


@pytest.mark.parametrize(("by", "coordinator"), [("ours", (1, 0, 0, 0)), ("stock", (1, 0, 0, 1))])
@on_ranks(4)
def test_one_rank_reads_the_metadata_for_all(checkpoint: Path, by: str, coordinator: tuple[int, ...]) -> None:
    """How often this rank read the index whole and in part, and the metadata, parsed and as bytes."""
    full = _full()
    save_by(by, checkpoint, full)
    state = blank(full)
    names = ("index_bytes", "read_index", "read_metadata", "metadata_bytes")
    with contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(mock.patch.object(metadata_file, name, wraps=getattr(metadata_file, name)))
            for name in names
        ]
        vescale_ckpt.load(checkpoint, state, timeout=FOREVER)
    assert_same(state, full)
    counts = tuple(of.call_count for of in calls)
    assert counts == ((0, 0, 0, 0) if dist.get_rank() else coordinator)


@on_ranks(2)
def test_ranks_that_see_different_saves_are_told(tmp_path: Path) -> None:
    """The same path on each rank, but not the same disk."""
    rank, full = dist.get_rank(), _full()
    for name in ("first", "second"):
        vescale_ckpt.save(tmp_path / name, full)
    state, own, texts = blank(full), tmp_path / f"disk{rank}", []
    for name in ("first", "first" if rank == 0 else "second"):
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(tmp_path / name, own / "checkpoint")
        dist.barrier()
        with contextlib.chdir(own):
            try:
                vescale_ckpt.load("checkpoint", state, broadcast_checkpoint=True, timeout=FOREVER)
                assert_same(state, full)
            except CheckpointError as error:
                texts.append(str(error))
    assert len(texts) == 1 and "different saves" in texts[0], texts


def test_metadata_of_a_later_save_are_not_taken_for_those_of_the_index(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, {"w": numbers(10)})
    reader = StorageReader(checkpoint)
    metadata = reader.read_metadata()
    vescale_ckpt.save(checkpoint, {"w": numbers(10) + 1})
    with pytest.raises(CheckpointError, match="replaced by a later save"):
        metadata.state_dict_metadata.keys()


@on_ranks(2)
def test_options_that_differ_between_ranks_are_told(checkpoint: Path) -> None:
    full = _full()
    vescale_ckpt.save(checkpoint, full)
    mine, texts = dist.get_rank() == 1, []
    for options in ({"strict": mine}, {"broadcast_checkpoint": mine}, {"verify": mine}):
        with pytest.raises(CheckpointError) as caught:
            vescale_ckpt.load(checkpoint, blank(full), timeout=FOREVER, **options)  # type: ignore[call-overload]
        texts.append(str(caught.value))
    assert all("different strict, broadcast_checkpoint, verify" in text for text in texts)


@on_ranks(2)
def test_no_checkpoint_is_told_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.load(tmp_path / "nothing", blank(_full()), timeout=FOREVER)
    assert "not a checkpoint" in str(caught.value)
