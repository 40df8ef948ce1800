"""Saves as safetensors files: written by all ranks at once, read by everybody, never a readable half."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors as stock
import safetensors.torch as stock_torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults, steps
from harness.ranks import on_ranks, run_ranks
from harness.states import Tied, layouts, same, sharded
from test_safetensors import all_dtypes
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    PerRank,
    SaveFailedError,
    SavePlanner,
    StorageFullError,
    StorageWriter,
    safetensors,
    settings,
)
from vescale_ckpt._checkpoint.safetensors import export_folder as hf_folder
from vescale_ckpt._checkpoint.safetensors import model_names
from vescale_ckpt._engine import _C
from vescale_ckpt._plan.planner import Planner
from vescale_ckpt._storage import locks
from vescale_ckpt._storage.storage import MARKER_PREFIX

State = dict[str, torch.Tensor]

INDEX = model_names.INDEX_NAME


def save(directory: Path | str, state: dict[str, Any], **options: Any) -> Any:
    names = ("max_shard_size", "metadata", "fqn_to_index_mapping")
    of_files = {name: options.pop(name) for name in names if name in options}
    return vescale_ckpt.save(directory, state, format=vescale_ckpt.Safetensors(**of_files), **options)


def files(directory: Path | str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))


def read(directory: Path | str) -> State:
    """All tensors, as the library reads them and as ours verify them; every file by its index, if there is one."""
    directory = Path(directory)
    names = files(directory)
    found: State = {}
    for name in names:
        loaded = stock_torch.load_file(directory / name)
        with safetensors.safe_open(directory / name) as ours:
            assert same(ours.get_tensors(), loaded)
        has_checksums = _C.SAFETENSORS_CHECKSUMS.encode() in (directory / name).read_bytes()
        assert has_checksums or not any(tensor.numel() for tensor in loaded.values())
        assert not found.keys() & loaded.keys()
        found.update(loaded)
    if names != ["model.safetensors"]:
        index = json.loads((directory / INDEX).read_text())
        assert names == model_names.file_names(len(names))
        assert sorted(set(index["weight_map"].values())) == names
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        for key, name in index["weight_map"].items():
            with stock.safe_open(directory / name, "pt") as file:
                assert key in file.keys()  # noqa: SIM118  # not a mapping
        assert index["weight_map"].keys() == found.keys()
    return found


def nothing_left(directory: Path | str) -> bool:
    names = os.listdir(directory)
    return not any(".tmp." in name for name in names) and (INDEX in names) == (files(directory) != [
        "model.safetensors"
    ])  # fmt: skip


def model(k: int) -> State:
    """Of several files at "1MB"."""
    return {
        "embed": torch.arange(300_000, dtype=torch.float32).view(600, 500) + k,
        "bias": torch.full((7,), float(k)),
        "large": torch.arange(1_100_000, dtype=torch.int32).view(1100, 1000) * (k + 1),
        "none": torch.empty(0, 3),
        "head": torch.full((200, 1000), k, dtype=torch.bfloat16),
    }


# --- One process


@pytest.mark.parametrize("limit", ["5GB", 1])
def test_every_dtype_bit_for_bit(checkpoint: Path, limit: int | str) -> None:
    state = all_dtypes()
    if limit == 1:
        state = dict(list(state.items())[::7])
    save(checkpoint, state, max_shard_size=limit)
    read(checkpoint)
    loaded: State = {}
    for name in files(checkpoint):
        loaded.update(safetensors.load_file(checkpoint / name))
    assert same(loaded, state)
    full = sum(tensor.numel() > 0 for tensor in state.values())
    assert (len(files(checkpoint)) == 1) if limit != 1 else (len(files(checkpoint)) >= full)


@pytest.mark.parametrize("rows", [12, 24_000])
def test_any_memory_layout(checkpoint: Path, rows: int) -> None:
    state = {}  # as `layouts`, but each in memory of its own
    for name, tensor in layouts(rows).items():
        memory = tensor.untyped_storage().clone()
        own = torch.empty(0, dtype=tensor.dtype)
        state[name] = own.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    save(checkpoint, state)
    assert same(read(checkpoint), {name: tensor.contiguous() for name, tensor in state.items()})


def test_tensors_are_put_in_files_in_their_order(checkpoint: Path) -> None:
    state = {
        "z": torch.zeros(100, dtype=torch.uint8),
        "y": torch.zeros(150, dtype=torch.uint8),
        "large": torch.zeros(300, dtype=torch.uint8),
        "x": torch.zeros(200, dtype=torch.uint8),
        "w": torch.zeros(51, dtype=torch.uint8),
        "v": torch.zeros(1, dtype=torch.uint8),
    }
    save(checkpoint, state, max_shard_size=250)
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    of = {key: int(name.split("-")[1]) for key, name in weight_map.items()}
    assert of == {"z": 1, "y": 1, "large": 2, "x": 3, "w": 4, "v": 4}
    assert same(read(checkpoint), state)


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [(7, 7), ("5GB", 5_000_000_000), ("1.5 MiB", 3 << 19), ("20 kb", 20_000), ("3", 3), ("3B", 3), ("4.5GiB", 9 << 29)],
)
def test_sizes_of_files(size: int | str, bytes_: int) -> None:
    assert settings.checked_bytes("max_shard_size", size) == bytes_


def test_only_known_formats(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="dcp, safetensors"):
        vescale_ckpt.save(checkpoint, {}, format="onnx")
    with pytest.raises(ValueError, match="dcp, safetensors"):
        StorageWriter(checkpoint, format="onnx")


def test_a_writer_can_be_pickled_and_used_again(checkpoint: Path) -> None:
    writer = StorageWriter(checkpoint, format=vescale_ckpt.Safetensors(max_shard_size="1MB"))
    for k in (0, 1):
        dcp.save(model(k), storage_writer=writer, checkpoint_id=checkpoint)
        assert same(read(checkpoint), model(k)) and len(files(checkpoint)) > 1
        writer = pickle.loads(pickle.dumps(writer))


def test_the_header_says_torch_or_what_was_asked_for(checkpoint: Path) -> None:
    save(checkpoint, {"a": torch.ones(1)})
    with safetensors.safe_open(checkpoint / "model.safetensors") as file:
        assert file.metadata() == {"format": "pt"}
    save(checkpoint, {"a": torch.ones(1)}, metadata={"step": "7"})
    with safetensors.safe_open(checkpoint / "model.safetensors") as file:
        assert file.metadata() == {"step": "7"}
    with pytest.raises(TypeError, match="metadata: expected texts, got"):
        save(checkpoint, {"a": torch.ones(1)}, metadata={"step": 7})


def test_what_is_no_tensor_is_refused_by_name(checkpoint: Path) -> None:
    state = {"w": torch.ones(2), "step": 3, "rng": PerRank([1]), "lr": {"a": 0.1}}
    with pytest.raises(CheckpointError, match=r"tensors only.*step, rng.rank_0_of_1, lr.a"):
        save(checkpoint, state)
    assert os.listdir(checkpoint) == []
    with pytest.raises(CheckpointError, match="no bits8"):
        save(checkpoint, {"w": torch.empty(3, dtype=torch.bits8)})


def test_a_name_that_is_no_text_is_refused(checkpoint: Path) -> None:
    save(checkpoint, {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"no UTF-8 text behind 'layer\.'"):
        save(checkpoint, {"layer.\ud800": torch.ones(2)})
    assert same(read(checkpoint), {"w": torch.ones(2)}) and nothing_left(checkpoint)


def test_a_module_keeps_its_names_and_tied_tensors_are_stored_once(checkpoint: Path) -> None:
    module = Tied()
    expected = {name: value.detach() for name, value in module.state_dict().items() if name != "head.weight"}
    for state in ({"": module}, module.state_dict()):
        save(checkpoint, state)
        assert same(read(checkpoint), expected)
        with safetensors.safe_open(checkpoint / "model.safetensors") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    # The library's own function ties them again.
    other = Tied()
    missing, unexpected = stock_torch.load_model(other, checkpoint / "model.safetensors")
    assert (missing, unexpected) == (set(), []) and torch.equal(other.head.weight, module.embed.weight)
    save(checkpoint, {"": module}, max_shard_size=1)
    assert json.loads((checkpoint / INDEX).read_text())["weight_map"].keys() == expected.keys()
    with pytest.raises(SaveFailedError, match=r"twice.*inner.bias"):
        save(checkpoint, {"": module, "inner.bias": torch.ones(1)})


def test_tensors_that_overlap_otherwise_are_refused(checkpoint: Path) -> None:
    base = torch.arange(10.0)
    for other in (base[2:], base.view(2, 5), base.view(torch.int32)):
        with pytest.raises(SaveFailedError, match=r"share memory.*a, b"):
            save(checkpoint, {"a": base, "b": other})
    save(checkpoint, {"a": base[:5], "b": base[5:]})  # parts that do not overlap
    assert same(read(checkpoint), {"a": base[:5], "b": base[5:]})


def test_a_marker_file_of_a_dead_save_is_removed_after_ten_minutes(checkpoint: Path) -> None:
    checkpoint.mkdir()
    dead, young = (checkpoint / f"{MARKER_PREFIX}{name}" for name in ("dead", "young"))
    for path in (dead, young):
        path.touch()
    os.utime(dead, (time.time() - 660,) * 2)
    save(checkpoint, {"w": torch.ones(2)})
    assert sorted(os.listdir(checkpoint)) == [young.name, "model.safetensors"]


# --- In a folder that is not empty


@pytest.mark.parametrize(("before", "after"), [("5GB", "1MB"), ("2MB", "2MB"), ("1MB", "5GB")])
def test_an_older_export_is_replaced(checkpoint: Path, before: str, after: str) -> None:
    save(checkpoint, model(0), max_shard_size=before)
    others = ["config.json", "model.txt", "model-1-of-2.safetensors.bak", "other.safetensors"]
    for name in others:
        (checkpoint / name).write_text("mine")
    with pytest.raises(CheckpointError, match="overwrite=False"):
        save(checkpoint, model(1), overwrite=False)
    save(checkpoint, model(1), max_shard_size=after)
    for name in others:
        assert (checkpoint / name).read_text() == "mine"
        (checkpoint / name).unlink()
    assert same(read(checkpoint), model(1)) and nothing_left(checkpoint)


def test_a_full_disk_is_known_before_anything_is_written(checkpoint: Path) -> None:
    save(checkpoint, model(0))
    with mock.patch.object(_C, "free_bytes", return_value=1000), pytest.raises(StorageFullError) as full:
        save(checkpoint, model(1))
    assert full.value.free == 1000 and full.value.needed > sum(tensor.nbytes for tensor in model(1).values())
    assert same(read(checkpoint), model(0)) and nothing_left(checkpoint)


def test_orphans_go_and_what_is_being_written_stays(checkpoint: Path) -> None:
    going_on = _folder(checkpoint)
    dead = _folder(checkpoint)
    assert dead.files._lock is not None
    dead.files._lock.release()  # as the death of its process does
    indexes = f"{INDEX}.tmp.1.1", f"{INDEX}.tmp.1.1.0123abcd"
    for directory_entry in (*indexes, "model.safetensors.tmp.1.1", "model.safetensors.tmp.nonsense"):
        (checkpoint / directory_entry).touch()
        os.utime(checkpoint / directory_entry, (0, 0))
    save(checkpoint, model(0))
    left = {name for name in os.listdir(checkpoint) if ".tmp." in name}
    assert left == {
        *(model_names.temporary_name(name, going_on.token) for name in model_names.file_names(2)),
        "model.safetensors.tmp.1.1",
        "model.safetensors.tmp.nonsense",
    }
    going_on.discard()
    assert len(os.listdir(checkpoint)) == 3


def test_without_locks_orphans_stay_for_a_day(checkpoint: Path) -> None:
    abandoned = _folder(checkpoint)
    with mock.patch.object(locks, "try_lock_alone", return_value=None):
        save(checkpoint, {"a": torch.ones(1)})
        assert any(abandoned.token in name for name in os.listdir(checkpoint))
        for name in model_names.file_names(2):
            os.utime(checkpoint / model_names.temporary_name(name, abandoned.token), (0, 0))
        save(checkpoint, {"a": torch.ones(1)})
    assert os.listdir(checkpoint) == ["model.safetensors"]


def _folder(directory: Path) -> hf_folder.ExportFolder:
    directory.mkdir(exist_ok=True)
    return hf_folder.ExportFolder(str(directory), [100, 200])


# --- Several ranks

ROWS, COLUMNS = 1201, 1003  # more than what is sent alone; cells and blocks end inside rows


def whole() -> State:
    """What `state_of_rank` is in all. Some tensors are small, some do not divide."""
    base = torch.arange(ROWS * COLUMNS, dtype=torch.float32)
    return {
        "rows": base.view(ROWS, COLUMNS),
        "columns": (base + 1).view(ROWS, COLUMNS),
        "both": (base + 2).view(ROWS, COLUMNS).to(torch.bfloat16),
        "replica": base * 2,
        "rows, columns": (base + 3).view(ROWS, COLUMNS),
        "few": torch.arange(3.0) + 5,
        "wide": (base[:12_000] + 7).view(3, 4000),
        "wide columns": torch.arange(3 * 400_000).view(3, 400_000) - 9,
        "cube": (base[:60_000] + 8).view(30, 40, 50),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "small": torch.arange(11, dtype=torch.int16),
    }


def placements(mesh_dims: int) -> dict[str, list[Any]]:
    one = {
        "rows": [Shard(0)], "columns": [Shard(1)], "both": [Shard(0)], "replica": [Replicate()],
        "rows, columns": [Shard(1)], "few": [Shard(0)], "wide": [Shard(1)], "wide columns": [Shard(1)],
        "cube": [Shard(1)], "none": [Shard(1)],
    }  # fmt: skip
    if mesh_dims == 1:
        return one
    two = {
        "both": [Shard(0), Shard(1)], "rows": [Replicate(), Shard(0)], "columns": [Replicate(), Shard(1)],
        "rows, columns": [Shard(1), Shard(0)], "replica": [Replicate(), Replicate()], "cube": [Shard(2), Shard(1)],
        "wide": [Shard(1), Shard(1)],
    }  # fmt: skip
    return {name: two.get(name, [Replicate(), *of]) for name, of in one.items()}


def state_of_rank(shape: tuple[int, ...], values: State | None = None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    state: dict[str, Any] = whole() if values is None else dict(values)
    for name, of in placements(len(shape)).items():
        state[name] = distribute_tensor(state[name], mesh, of, src_data_rank=None)
    return state


def _export(directory: str, shape: tuple[int, ...]) -> list[int]:
    state = state_of_rank(shape)
    written = []
    for way, options in {
        "one": {},
        "several": {"max_shard_size": "5MB"},
        "again": {"max_shard_size": "5MB"},
        "async": {"max_shard_size": "5MB", "async_checkpoint": True},
    }.items():
        written.append(save(f"{directory}/{way}", state, **options).result().bytes)
    planners = {"dcp": SavePlanner(), "first": SavePlanner(placement="lowest_rank"), "stock": DefaultSavePlanner()}
    for way, planner in planners.items():
        writer = StorageWriter(f"{directory}/{way}", format=vescale_ckpt.Safetensors(max_shard_size="5MB"))
        dcp.save(state, storage_writer=writer, planner=planner)
        dcp.save(state, storage_writer=writer, planner=planner)
    # Torch's own reader, into shards.
    for way in ("one", "several"):
        target = {
            name: torch.zeros_like(value) if not isinstance(value, DTensor) else value * 0
            for name, value in state.items()
            if name != "none"
        }
        dcp.load(target, storage_reader=HuggingFaceStorageReader(f"{directory}/{way}"))
        for name, value in target.items():
            mine, theirs = (x.to_local() if isinstance(x, DTensor) else x for x in (value, state[name]))
            assert torch.equal(mine, theirs), name
    return written


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_all_ranks_write_the_final_files(checkpoint: Path, shape: tuple[int, ...]) -> None:
    size = 2 if shape == (2,) else 4
    written = run_ranks(size, _export, str(checkpoint), shape)
    expected = whole()
    for way in ("one", "several", "again", "async", "first", "dcp", "stock"):
        directory = checkpoint / way
        assert same(read(directory), expected), way
        assert nothing_left(directory)
        assert (len(files(directory)) == 1) == (way == "one")
    total = sum(tensor.nbytes for tensor in expected.values())
    for number in range(4):  # each byte is written once, and nobody writes a piece of 4 MiB more than its share
        of_ranks = [of_rank[number] for of_rank in written]
        assert sum(of_ranks) == total and max(of_ranks) <= total / size + (4 << 20)


def _fail(directory: str, who: int, call: str, error: int) -> str:
    values = {"values": model(1)} if call == "object" else model(1)
    state: dict[str, Any] = {
        name: value if name != "embed" else distribute_tensor(
            value, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        for name, value in values.items()
    }  # fmt: skip
    mine = dist.get_rank() == who
    if call == "die":
        if mine:
            faults.inject("sync", errno.EIO, 0, 0)
            with mock.patch.object(_C.BoxWriter, "finish", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
                save(directory, state)
    elif mine and call == "object":
        state["mine"] = 1
    elif mine:
        faults.inject(call, error, 0, 1000)
    try:
        save(directory, state, timeout=60.0)
    except CheckpointError as raised:
        return f"{type(raised).__name__} {getattr(raised, 'rank', None)}: {raised}"
    finally:
        faults.clear()
    return "saved"


@pytest.mark.parametrize(
    ("call", "error", "kind"),
    [("write", errno.ENOSPC, "StorageFullError 1"), ("sync", errno.EIO, "CheckpointError 1"),
     ("object", 0, "CheckpointError 0")],
)  # fmt: skip
def test_the_error_of_one_rank_is_everybodys(checkpoint: Path, call: str, error: int, kind: str) -> None:
    save(checkpoint, model(0), max_shard_size="1MB")
    answers = run_ranks(2, _fail, str(checkpoint), 1, call, error)
    assert all(answer.startswith(kind) for answer in answers), answers
    assert call != "object" or "mine" in answers[1]
    assert same(read(checkpoint), model(0)) and nothing_left(checkpoint)
    assert run_ranks(2, _fail, str(checkpoint), -1, "", 0) == ["saved", "saved"]
    assert same(read(checkpoint), model(1))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_while_it_writes(checkpoint: Path, who: int) -> None:
    save(checkpoint, model(0), max_shard_size="1MB")
    answers = run_ranks(2, _fail, str(checkpoint), who, "die", 0, check=False)
    assert "CheckpointTimeoutError" in str(answers[1 - who]), answers
    assert same(read(checkpoint), model(0))
    save(checkpoint, model(2), max_shard_size="1MB")
    assert same(read(checkpoint), model(2)) and nothing_left(checkpoint)
    shutil.rmtree(checkpoint)


# --- Files by numbers


def test_a_mapping_says_which_file_each_tensor_goes_to(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(2, 2), "c": torch.arange(5)}
    for _ in range(2):  # the second save reuses the plan
        vescale_ckpt.save(
            tmp_path,
            state,
            format=vescale_ckpt.Safetensors(fqn_to_index_mapping={"a": 3, "b": 1, "c": 3, "not there": 2}),
        )
        names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
        assert names == {"a": second, "b": first, "c": second}
        assert set(stock_torch.load_file(tmp_path / second)) == {"a", "c"}
    assert same(vescale_ckpt.load(tmp_path), state)
    vescale_ckpt.save(tmp_path, state, format=vescale_ckpt.Safetensors(fqn_to_index_mapping=dict.fromkeys(state, 1)))
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_a_mapping_without_a_key_is_refused_by_name(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="fqn_to_index_mapping has no file for b"):
        vescale_ckpt.save(tmp_path, state, format=vescale_ckpt.Safetensors(fqn_to_index_mapping={"a": 1}))
    for wrong in ({}, {"a": 0, "b": 1}, {"a": True, "b": 1}, [("a", 1)]):
        with pytest.raises(ValueError, match="fqn_to_index_mapping"):
            vescale_ckpt.save(tmp_path, state, format=vescale_ckpt.Safetensors(fqn_to_index_mapping=wrong))  # type: ignore[arg-type]


# --- Shared tensors, and plans that are used again


@on_ranks(4)
def test_ties_of_uneven_shards_are_known_and_planned_once(tmp_path: Path) -> None:
    """The last rank has nothing of them, and cannot see that they are tied."""
    made = []
    plan_of_all = Planner.plan_all

    def counted(self: Planner, requests: Any) -> Any:
        made.append(len(requests))
        return plan_of_all(self, requests)

    with steps.no_plans_known(), mock.patch.object(Planner, "plan_all", counted):
        for k in range(3):
            tensor = sharded(torch.arange(10.0).view(5, 2) + k, Shard(0))
            other = sharded(torch.ones(5, 2) * k, Shard(0))
            save(tmp_path / "x", {"other": other, "embed": tensor, "head": tensor})
    found = read(tmp_path / "x")
    assert found.keys() == {"other", "embed"}
    assert found["embed"].equal(torch.arange(10.0).view(5, 2) + 2) and found["other"].equal(torch.ones(5, 2) * 2)
    with safetensors.safe_open(tmp_path / "x" / "model.safetensors") as file:
        assert file.metadata() == {"format": "pt", "head": "embed"}
    assert made == ([] if dist.get_rank() else [4])


def test_a_conjugate_is_not_the_tensor_whose_memory_it_has(tmp_path: Path) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    with pytest.raises(CheckpointError, match="share memory"):
        save(tmp_path, {"a": tensor, "b": tensor.conj()})
    save(tmp_path, {"a": tensor, "b": tensor.clone().conj(), "c": tensor})
    found = read(tmp_path)
    assert found.keys() == {"a", "b"} and found["b"].equal(tensor.conj().resolve_conj())


def test_ties_that_change_while_a_save_fails(tmp_path: Path) -> None:
    """The layout of a save that failed is no layout that ranks have."""
    tensor = torch.arange(5000.0)
    one = {"a": tensor}
    tied = {"a": tensor, **{f"{'b' * 1000}{number}": tensor for number in range(20)}}
    for first, second in ((one, tied), (tied, one)):
        save(tmp_path, first)
        with steps.instead("ask for free space", lambda *_: 0), pytest.raises(StorageFullError):
            save(tmp_path, second)
        save(tmp_path, first)
        assert read(tmp_path)["a"].equal(tensor)


def test_a_stock_planner_that_keeps_its_plans_is_refused(tmp_path: Path) -> None:
    def of_stock(directory: Path) -> None:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(directory, format="safetensors"), planner=planner)

    of_stock(tmp_path / "first")
    with pytest.raises(dcp.api.CheckpointException, match="enable_plan_caching"):
        of_stock(tmp_path / "second")
    assert read(tmp_path / "first")["a"].equal(torch.ones(3))
    assert not files(tmp_path / "second")
