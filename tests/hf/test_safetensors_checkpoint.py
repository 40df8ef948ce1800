"""Safetensors files as checkpoints: whoever wrote them, into any sharding, each byte once, damage and lies named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as stock_torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.files import flipped
from harness.ranks import on_ranks, run_ranks
from harness.saves import cause
from harness.states import Tied, assert_same, numbers, sharded
from test_safetensors import entry, with_header
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    LoadPlanner,
    MissingKeysError,
    StorageReader,
    UntrustedCheckpointError,
    safetensors,
)

FOREVER = 60.0
INDEX = "model.safetensors.index.json"
PLANNERS = (DefaultLoadPlanner, LoadPlanner)

State = dict[str, torch.Tensor]


def state() -> State:
    """Large enough to be read past the page cache and by blocks; empty and scalar tensors, and odd addresses."""
    return {
        "embed.weight": numbers(1024, 256, dtype=torch.bfloat16),
        "layers.0.weight": numbers(300, 1000, first=1),
        "layers.0.bias": numbers(77, dtype=torch.float16),
        "layers.1.weight": numbers(512, 512, first=2),
        "flags": numbers(13, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(0.5),
    }


def zeros(values: State) -> State:
    return {key: torch.full_like(value, 7) for key, value in values.items()}


def write(directory: Path, values: State, by: str, files: int = 2) -> Path:
    """A directory as transformers writes it; `by` "us" or "stock"."""
    directory.mkdir(parents=True, exist_ok=True)
    save = safetensors.save_file if by == "us" else stock_torch.save_file
    names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    weight_map = {key: names[number % files] for number, key in enumerate(values)}
    for name in names:
        save({key: value for key, value in values.items() if weight_map[key] == name}, str(directory / name))
    index = {"metadata": {"total_size": sum(value.nbytes for value in values.values())}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    return directory


def rewrite_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


# --- What is read


@pytest.mark.parametrize("by", ["us", "stock"])
def test_a_directory_loads_into_a_state_and_into_new_tensors(tmp_path: Path, by: str) -> None:
    values = state()
    directory = write(tmp_path / "d", values, by)
    assert_same(vescale_ckpt.load(directory), values)
    filled = zeros(values)
    report = vescale_ckpt.load(directory, filled)
    assert_same(filled, values)
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    size = sum(value.nbytes for value in values.values())
    assert report.stats.bytes == size
    assert report.stats.unverified_bytes == (0 if by == "us" else size)
    assert vescale_ckpt.load(directory, keys="layers.0").keys() == {"layers.0.weight", "layers.0.bias"}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("by", ["us", "stock"])
def test_dcp_load_reads_it(tmp_path: Path, by: str, planner: type[DefaultLoadPlanner]) -> None:
    values = state()
    directory = write(tmp_path / "d", values, by)
    filled = zeros(values)
    reader = StorageReader(directory)
    dcp.load(filled, storage_reader=reader, planner=planner(), no_dist=True)
    assert_same(filled, values)
    again = write(tmp_path / "again", {key: value + 1 for key, value in values.items()}, by)
    dcp.load(filled, checkpoint_id=again, storage_reader=reader, planner=planner(), no_dist=True)
    assert_same(filled, {key: value + 1 for key, value in values.items()})


@pytest.mark.parametrize("by", ["us", "stock"])
def test_one_file_and_a_directory_without_an_index(tmp_path: Path, by: str) -> None:
    values = state()
    write(tmp_path / "d", values, by, files=1)
    (file,) = (tmp_path / "d").glob("*.safetensors")
    assert_same(vescale_ckpt.load(file), values)
    filled = zeros(values)
    dcp.load(filled, storage_reader=StorageReader(file), no_dist=True)
    assert_same(filled, values)
    (tmp_path / "d" / INDEX).unlink()
    assert_same(vescale_ckpt.load(tmp_path / "d"), values)
    bare = tmp_path / "blob"  # whatever its name
    shutil.copy(file, bare)
    assert_same(vescale_ckpt.load(bare), values)


def test_a_snapshot_of_a_hub_is_links_out_of_the_directory(tmp_path: Path) -> None:
    values = state()
    blobs = write(tmp_path / "blobs", values, "stock")
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, name in enumerate(sorted(os.listdir(blobs))):
        os.rename(blobs / name, blobs / f"{number:064x}")
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    assert_same(vescale_ckpt.load(snapshot), values)
    assert vescale_ckpt.verify(snapshot).ok


def test_the_index_decides_what_belongs(tmp_path: Path) -> None:
    values = state()
    directory = write(tmp_path / "d", values, "us")
    safetensors.save_file({"embed.weight": torch.zeros(2)}, directory / "consolidated.safetensors")
    (directory / "other.safetensors.index.json").write_text("not looked at")
    rewrite_index(directory, lambda index: index["weight_map"].pop("flags"))
    del values["flags"]
    assert_same(vescale_ckpt.load(directory), values)


def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    values = {f"{number:03}": numbers(100, 5, first=number) for number in range(150)}
    directory = write(tmp_path / "d", values, "stock", files=150)
    before = len(os.listdir("/proc/self/fd"))
    assert_same(vescale_ckpt.load(directory), values)
    assert vescale_ckpt.verify(directory).unverified_bytes == 150 * 2000
    assert len(os.listdir("/proc/self/fd")) <= before + 8


# --- Tied weights


def test_a_removed_name_gets_the_kept_ones_values(tmp_path: Path) -> None:
    model = Tied()
    file = tmp_path / "model.safetensors"
    stock_torch.save_model(model, str(file))
    stored = stock_torch.load_file(file)
    removed = {"embed.weight", "head.weight"} - stored.keys()
    assert len(removed) == 1
    for target in (file, tmp_path):
        assert_same(vescale_ckpt.load(target), stored)
        fresh = Tied()
        report = vescale_ckpt.load(target, {"model": fresh}, rename={"model": ""})
        assert_same(fresh.state_dict(), model.state_dict())
        assert report.unexpected == []
        separate = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
        stats = vescale_ckpt.load(target, separate).stats
        assert_same(separate, dict(model.state_dict()))
        assert stats.read_bytes < 1.5 * sum(value.nbytes for value in stored.values()) + 8192
        dcp.load(separate, storage_reader=StorageReader(target), no_dist=True)
        (name,) = removed
        assert list(vescale_ckpt.load(target, keys=[name])) == [name]


def _of_export(directory: Path, values: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    vescale_ckpt.save(directory, values, format=vescale_ckpt.Safetensors(metadata=metadata, max_shard_size=32))


def _of_file(directory: Path, values: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    directory.mkdir()
    safetensors.save_file(values, directory / "model.safetensors", metadata)


@pytest.mark.parametrize("by", [_of_export, _of_file])
def test_a_text_of_the_users_stands_for_no_tensor(tmp_path: Path, by: Callable[..., None]) -> None:
    values = {"w": numbers(4, 2), "pt": numbers(4, 2, first=9)}
    texts = {"note": "w", "format": "pt", "vescale_ckpt.tied": json.dumps({"other": "w"})}
    by(tmp_path / "d", values, texts)
    assert_same(vescale_ckpt.load(tmp_path / "d"), values)
    for name in ("note", "format", "other"):
        with pytest.raises(MissingKeysError):
            vescale_ckpt.load(tmp_path / "d", keys=[name])
        with pytest.raises(MissingKeysError):
            vescale_ckpt.load(tmp_path / "d", {name: torch.zeros(4, 2)})
    (file, *_) = (tmp_path / "d").glob("*.safetensors")
    with safetensors.safe_open(file) as opened:
        assert opened.metadata() == {"note": "w", "format": "pt"}


def test_ties_of_an_export_keep_their_names(tmp_path: Path) -> None:
    """Also beside texts of the user's of the same name, and in files from before ties had a mark."""
    values = {"w": numbers(4, 2), "v": numbers(4, 2, first=9)}
    _of_export(tmp_path / "d", {**values, "note": values["w"], "tied": values["v"]}, {"note": "v"})
    expected = {**values, "note": values["w"], "tied": values["v"]}
    target = {name: torch.zeros(4, 2) for name in expected}
    vescale_ckpt.load(tmp_path / "d", target)
    assert_same(target, expected)
    file = tmp_path / "old.safetensors"
    stock_torch.save_file(values, file, {"tied": "v"})
    assert_same(vescale_ckpt.load(file, keys=["tied"]), {"tied": values["v"]})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_was_exported_under_an_empty_name_loads_by_it(tmp_path: Path, device: str) -> None:
    model = Tied()
    vescale_ckpt.save(tmp_path / "d", {"": model}, format="safetensors")
    with torch.device(device):
        fresh = Tied()
    report = vescale_ckpt.load(tmp_path / "d", {"": fresh})
    assert_same(fresh.state_dict(), model.state_dict())
    assert not report.missing and not report.unexpected
    values = {"a": torch.ones(2), "b": torch.ones(3)}
    vescale_ckpt.save(tmp_path / "d", {"": values}, format="safetensors")
    filled = {"": zeros(values)}
    vescale_ckpt.load(tmp_path / "d", filled)
    assert_same(filled[""], values)
    with pytest.raises(MissingKeysError, match="not in the state"):
        vescale_ckpt.load(tmp_path / "d", {"": torch.nn.Linear(2, 2)}, strict=True)
    vescale_ckpt.save(tmp_path / "dcp", {"": values})
    filled = {"": zeros(values)}
    vescale_ckpt.load(tmp_path / "dcp", filled)
    assert_same(filled[""], values)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_key_that_begins_with_a_dot_is_no_key_below_the_empty_one(tmp_path: Path, format: Any) -> None:
    vescale_ckpt.save(tmp_path, {"w": torch.ones(2), "x.y": torch.ones(2)}, format=format)
    for state in (
        {".w": torch.zeros(2)},
        {"": {"x": {"y": torch.zeros(2)}}, ".w": torch.zeros(2)},
        {".x": {"y": torch.zeros(2)}},
    ):
        with pytest.raises(MissingKeysError, match=r"missing from the checkpoint: '\.[wx]"):
            vescale_ckpt.load(tmp_path, state)
        assert not any(value.any() for value in state.values() if isinstance(value, torch.Tensor))
    state = {"": {"w": torch.zeros(2)}}
    vescale_ckpt.load(tmp_path, state)
    assert state[""]["w"].eq(1).all()
    values = {
        ".w": torch.ones(2),
        "": {"w": torch.full((2,), 2.0)} if format == "safetensors" else {"v": torch.ones(2)},
    }
    vescale_ckpt.save(tmp_path, values, format=format)
    target = {".w": torch.zeros(2)}
    vescale_ckpt.load(tmp_path, target)
    assert target[".w"].eq(1).all()


def test_files_of_other_formats_are_told_how_to_convert(tmp_path: Path) -> None:
    values = {"w": torch.ones(2)}
    file = tmp_path / "d" / "pytorch_model.bin"
    file.parent.mkdir()
    torch.save(values, file)
    for path in (file, file.parent):
        with pytest.raises(CheckpointError, match=r"convert\('.*pytorch_model\.bin'"):
            vescale_ckpt.load(path)
        with pytest.raises(CheckpointException, match="convert"):
            dcp.load(dict(values), storage_reader=StorageReader(path), no_dist=True)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": "w", "a": "w"}', "[" * 5000])
def test_ties_that_make_no_sense(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.safetensors"
    stock_torch.save_file({"w": torch.ones(2)}, file, {"vescale_ckpt.tied": text})
    with pytest.raises(UntrustedCheckpointError, match="tied"):
        vescale_ckpt.load(file)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_that_the_file_knows_by_one_name_are_not_missing(tmp_path: Path, device: str) -> None:
    """transformers drops the other names without a word."""
    model = Tied()
    values = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    safetensors.save_file(values, tmp_path / "model.safetensors")
    with torch.device(device):
        fresh = Tied()
    report = vescale_ckpt.load(tmp_path, {"model": fresh}, rename={"model": ""})
    assert report.missing == []
    assert_same(fresh.state_dict(), model.state_dict())
    assert fresh.head.weight is fresh.embed.weight
    with pytest.raises(MissingKeysError) as caught:  # tied to nothing that is there
        vescale_ckpt.load(tmp_path, {"head.weight": torch.zeros(50, 8)})
    assert caught.value.missing == ["head.weight"]


# --- Damage and lies


def test_two_values_for_one_memory_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checksum of the header, which both have in common, does not make them equal."""
    vescale_ckpt.save(tmp_path, {"a": torch.ones(4), "b": torch.full((4,), 2.0)}, format="safetensors")
    memory = torch.zeros(4)
    vescale_ckpt.load(tmp_path, {"a": memory, "b": memory})
    assert_same(memory, torch.full((4,), 2.0))
    assert "both get the value of b" in caplog.text
    caplog.clear()
    tied = torch.ones(4)
    vescale_ckpt.save(tmp_path, {"a": tied, "b": tied}, format="safetensors")
    vescale_ckpt.load(tmp_path, {"a": memory, "b": memory})
    assert_same(memory, tied)
    assert not caplog.text


def test_a_flipped_bit_of_ours_is_found(tmp_path: Path) -> None:
    values = state()
    directory = write(tmp_path / "d", values, "us")
    file = directory / "model-00002-of-00002.safetensors"  # the second of the keys, the fourth, ...
    assert vescale_ckpt.verify(directory).ok
    bit = 8 * (file.stat().st_size - values["layers.1.weight"].nbytes // 2)
    with flipped(file, bit):
        with pytest.raises(CorruptCheckpointError) as caught:
            vescale_ckpt.load(directory, zeros(values))
        assert caught.value.file == str(file) and caught.value.key in values
        key = caught.value.key
        report = vescale_ckpt.verify(directory)
        assert [(damage.key, damage.file) for damage in report.damaged] == [(key, str(file))]
        loaded = vescale_ckpt.load(directory, verify=False)
        assert [name for name in values if not torch.equal(loaded[name], values[name])] == [key]
    with flipped(file, 8 * 20):  # the header
        with pytest.raises(CorruptCheckpointError, match="00002"):
            vescale_ckpt.load(directory, zeros(values))
        damaged = vescale_ckpt.verify(directory, quick=True).damaged
        assert [damage.file for damage in damaged] == [str(file)]


def test_verify_says_what_could_not_be_verified(tmp_path: Path) -> None:
    values = state()
    size = sum(value.nbytes for value in values.values())
    for by, unverified in (("us", 0), ("stock", size)):
        report = vescale_ckpt.verify(write(tmp_path / by, values, by))
        assert report.ok
        assert (report.keys, report.files, report.bytes, report.unverified_bytes) == (len(values), 2, size, unverified)
    (tmp_path / "us" / "model-00001-of-00002.safetensors").unlink()
    with open(tmp_path / "us" / "model-00002-of-00002.safetensors", "r+b") as file:
        file.truncate(1000)
    damaged = vescale_ckpt.verify(tmp_path / "us", quick=True).damaged
    assert ["missing" in damage.reason for damage in damaged] == [True, False]


def test_a_file_that_is_replaced_after_it_was_planned_on(tmp_path: Path) -> None:
    values = state()
    directory = write(tmp_path / "d", values, "stock")
    reader, planner, filled = StorageReader(directory), LoadPlanner(), zeros(values)
    metadata = reader.read_metadata()
    planner.set_up_planner(filled, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(planner.create_local_plan())
    write(directory, {**values, "more": torch.zeros(3)}, "stock")
    with pytest.raises(CheckpointError, match="replaced") as raised:
        reader.read_data(plan, planner)
    assert not isinstance(raised.value, CorruptCheckpointError), "nothing is damaged"


def _in_the_other_file(places: dict[str, Any]) -> dict[str, str]:
    names = sorted(set(places.values()))
    return {"flags": names[1 - names.index(places["flags"])]}


@pytest.mark.parametrize(
    ("lie", "kind", "text"),
    [
        (lambda places: {"flags": "../secret.safetensors"}, UntrustedCheckpointError, "flags.*outside"),
        (lambda places: {"flags": "/etc/passwd"}, UntrustedCheckpointError, "flags.*outside"),
        (lambda places: {"flags": 7}, UntrustedCheckpointError, "flags"),
        (lambda places: {"flags": "model-00009-of-00009.safetensors"}, CorruptCheckpointError, "flags.*00009.*missing"),
        (lambda places: {"phantom": places["flags"]}, CorruptCheckpointError, "phantom.*no such tensor"),
        (_in_the_other_file, CorruptCheckpointError, "flags.*no such tensor"),
    ],
)
def test_an_index_that_lies(
    tmp_path: Path, lie: Callable[[dict[str, Any]], dict[str, Any]], kind: type[CheckpointError], text: str
) -> None:
    directory = write(tmp_path / "d", state(), "us")
    safetensors.save_file({"flags": state()["flags"]}, tmp_path / "secret.safetensors")
    rewrite_index(directory, lambda index: index["weight_map"].update(lie(index["weight_map"])))
    with pytest.raises(kind, match=text):
        vescale_ckpt.load(directory)
    assert not vescale_ckpt.verify(directory, quick=True).ok


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"weight_map": {"flags": "a.safetensors", "flags": "b.safetensors"}}',
        b'{"weight_map": NaN}',
        b'{"weight_map": [1, 2]}',
        b'{"metadata": {}}',
        b'{"weight_map": ' + b"9" * 10_000 + b"}",
    ],
)
def test_an_index_that_is_none(tmp_path: Path, content: bytes) -> None:
    directory = write(tmp_path / "d", state(), "us")
    (directory / INDEX).write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json") as caught:
        vescale_ckpt.load(directory)
    assert caught.value.file == str(directory / INDEX)


def test_an_index_that_is_no_small_file(tmp_path: Path) -> None:
    directory = write(tmp_path / "d", state(), "us")
    os.truncate(directory / INDEX, 1 << 40)
    with pytest.raises(UntrustedCheckpointError, match="bytes"):
        vescale_ckpt.load(directory)
    (directory / INDEX).unlink()
    os.mkfifo(directory / INDEX)
    with pytest.raises(UntrustedCheckpointError, match="is no index"):
        vescale_ckpt.load(directory)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        safetensors.save_file({"x": torch.zeros(3), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"x: a\.safetensors in .*, and b\.safetensors too"):
        vescale_ckpt.load(tmp_path)
    assert_same(vescale_ckpt.load(tmp_path / "b.safetensors"), {"x": torch.zeros(3), "b": torch.zeros(1)})
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="several indexes"):
        vescale_ckpt.load(tmp_path)


# --- Boxes: what torch's writer saves from several ranks


def boxes_file(path: Path, values: State, offsets: object) -> None:
    stock_torch.save_file(values, str(path), {"DCP_SHARDING_INFO": json.dumps(offsets)})


@pytest.mark.parametrize(
    "offsets",
    [
        {"x": {"saved_offsets": [-1, 0]}},
        {"x": {"saved_offsets": [0]}},
        {"x": {"saved_offsets": [1 << 62, 0]}},
        {"x": {"saved_offsets": [0.5, 0]}},
        {"x": {"saved_offsets": "ab"}},
        {"x": [0, 0]},
        [1],
    ],
)
def test_boxes_that_lie(tmp_path: Path, offsets: object) -> None:
    boxes_file(tmp_path / "a.safetensors", {"x": torch.zeros(2, 3)}, offsets)
    with pytest.raises(UntrustedCheckpointError, match="DCP_SHARDING_INFO"):
        vescale_ckpt.load(tmp_path)


def test_boxes_that_overlap_or_leave_a_hole(tmp_path: Path) -> None:
    def put(name: str, value: torch.Tensor, *offset: int) -> None:
        boxes_file(tmp_path / f"{name}.safetensors", {"x": value}, {"x": {"saved_offsets": offset}})

    put("a", torch.zeros(2, 3), 0, 0)
    put("b", torch.zeros(2, 3), 1, 0)
    with pytest.raises(CheckpointError, match=r"x: a\.safetensors"):
        vescale_ckpt.load(tmp_path)
    put("b", torch.zeros(2, 3), 3, 0)
    for planner in PLANNERS:
        reader = StorageReader(tmp_path)
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"x": torch.zeros(5, 3)}, storage_reader=reader, planner=planner(), no_dist=True)
        assert "does not hold all of it" in str(cause(caught.value))
    with pytest.raises(CorruptCheckpointError, match=r"does not hold all of it"):
        vescale_ckpt.load(tmp_path, {"x": torch.zeros(5, 3)})
    with pytest.raises(UntrustedCheckpointError, match="claims 60 bytes"):
        vescale_ckpt.load(tmp_path)
    assert ["x: 12 of its 15 elements" in damage.reason for damage in vescale_ckpt.verify(tmp_path).damaged] == [True]
    put("b", torch.zeros(2, 3, dtype=torch.float64), 2, 0)
    with pytest.raises(CheckpointError, match="another dtype"):
        vescale_ckpt.load(tmp_path)
    put("b", torch.ones(1, 3), 2, 0)
    put("c", torch.empty(0, 3), 3, 0)
    assert_same(vescale_ckpt.load(tmp_path), {"x": torch.tensor([0.0, 0, 1])[:, None].expand(3, 3).contiguous()})


@on_ranks(2)
def test_what_torchs_writer_saved_from_two_ranks(tmp_path: Path) -> None:
    """Ours reads what torch's reader reads, in every form that torch's writer has."""
    values = state()
    values.pop("scalar")  # has no dimension to be cut along

    def spread(full: State, dim: int) -> dict[str, Any]:
        return {key: sharded(value, Shard(min(dim, value.dim() - 1))) for key, value in full.items()}

    dcp.save(spread(values, 0), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "d"), save_distributed=True))
    assert len(list((tmp_path / "d").glob("shard-*.safetensors"))) == dist.get_world_size()
    for dim in (0, 1):
        theirs, ours, fast = (spread(zeros(values), dim) for _ in range(3))
        dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(tmp_path / "d")))
        dcp.load(ours, storage_reader=StorageReader(tmp_path / "d"), planner=PLANNERS[dim]())
        vescale_ckpt.load(tmp_path / "d", fast, timeout=FOREVER)
        for key, value in spread(values, dim).items():
            for loaded in (theirs, ours, fast):
                assert_same(loaded[key].to_local(), value.to_local())
    assert_same(vescale_ckpt.load(tmp_path / "d", timeout=FOREVER), values)

    floats = {key: value for key, value in values.items() if value.is_floating_point() and value.numel()}  # no others
    writer = HuggingFaceStorageWriter(str(tmp_path / "one"), save_distributed=True, enable_consolidation=True)
    dcp.save(spread(floats, 0), storage_writer=writer)
    for part in ("", "sharded"):
        assert_same(vescale_ckpt.load(tmp_path / "one" / part, timeout=FOREVER), floats)


# --- Several ranks


def _copies_of_their_own(directory: Path, same: bool) -> str:
    """Each rank has the checkpoint on a disk of its own, under one path."""
    rank, values, here = dist.get_rank(), state(), os.getcwd()
    write(directory / str(rank) / "d", values if same or rank == 0 else {**values, "scalar": torch.zeros(1)}, "us")
    os.chdir(directory / str(rank))
    filled = zeros(values)
    filled.pop("scalar")
    try:
        vescale_ckpt.load("d", filled, broadcast_checkpoint=same, timeout=FOREVER)
    except CheckpointError as error:
        return str(error)
    finally:
        os.chdir(here)
    del values["scalar"]
    assert_same(filled, values)
    return ""


def test_ranks_with_copies_of_their_own(tmp_path: Path) -> None:
    assert run_ranks(2, _copies_of_their_own, tmp_path / "same", True) == ["", ""]
    for answer in run_ranks(2, _copies_of_their_own, tmp_path / "other", False):
        assert "ranks see different files" in answer


# --- Odd headers


def test_a_header_with_strange_names(tmp_path: Path) -> None:
    values = {"": torch.zeros(2), "a.b": torch.ones(1), "ünï\n": torch.ones(3)}
    stock_torch.save_file(values, str(tmp_path / "model.safetensors"))
    assert_same(vescale_ckpt.load(tmp_path), values)


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1 << 62, 0], [0, (1 << 63) - 1], [0, 1 << 40, 1 << 40]])
def test_a_shape_that_no_memory_holds_is_named(tmp_path: Path, shape: list[int]) -> None:
    tensors = {"odd": entry("F32", shape, [0, 0]), "sound": entry("F32", [1], [0, 4])}
    (tmp_path / "model.safetensors").write_bytes(with_header(tensors, bytes(4)))
    for state in (None, {"sound": torch.ones(1)}):
        with pytest.raises(UntrustedCheckpointError, match="odd"):
            vescale_ckpt.load(tmp_path, state)
    assert ["odd" in found.reason for found in vescale_ckpt.verify(tmp_path).refused] == [True]
