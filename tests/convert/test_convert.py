"""Conversions: every format into every other, read by the libraries' own readers; what goes wrong leaves nothing."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch as stock_safetensors
import torch
import torch.distributed.checkpoint as dcp
from harness import faults, steps
from harness.children import fork, killed_before
from harness.files import flip
from harness.ranks import RanksFailedError, run_ranks
from harness.states import assert_same, random_tensor, same

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    ConvertReport,
    CorruptCheckpointError,
    MissingKeysError,
    SaveFailedError,
    StorageFullError,
    UntrustedCheckpointError,
    convert,
)
from vescale_ckpt import safetensors as ours_safetensors
from vescale_ckpt._checkpoint.checkpoint import Read
from vescale_ckpt._checkpoint.open_checkpoint import open_checkpoint
from vescale_ckpt._convert import batches
from vescale_ckpt._convert import convert as convert_module
from vescale_ckpt._convert.formats import Format
from vescale_ckpt._convert.plan import plan
from vescale_ckpt._engine import _C
from vescale_ckpt._state.flatten import flatten
from vescale_ckpt.cli import main

Tensors = dict[str, torch.Tensor]

NAMES: dict[Format, str] = {"dcp": "dcp", "safetensors": "one.safetensors", "torch": "one.pt"}
FORMATS = list(NAMES)
SMALLEST = 1 << 20  # bytes under way: batches of a third, pieces of a sixth


def state() -> dict[str, Any]:
    dtypes = [getattr(torch, name) for name in _C.safetensors_dtypes() if hasattr(torch, name)]
    return {
        "model": {
            **{f"{dtype}": random_tensor((5, 8), dtype) for dtype in dtypes},
            "scalar": torch.tensor(0.5),
            "empty": torch.empty(0, 3),
            "large": torch.randn(700, 1000),  # more than one batch of the smallest
            "blocks": [{"w": torch.randn(3)}, {"w": torch.randn(3)}],
        },
        "optimizer": {"step": torch.tensor(7), "betas": (0.9, 0.95), "names": ["a", "b"]},
        "epoch": 3,
    }


def tensors_of(values: dict[str, Any]) -> Tensors:
    return {key: value for key, value in flatten(values)[0].items() if isinstance(value, torch.Tensor)}


OBJECTS = {"optimizer.betas": (0.9, 0.95), "optimizer.names": ["a", "b"], "epoch": 3}


def read_by_us(path: Path) -> Tensors:
    with closing(open_checkpoint(str(path))) as source:
        found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in source.tensors.items()}
        source.read([Read(key, (0,) * target.ndim, target) for key, target in found.items()])
        return found


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    torch.manual_seed(0)
    return state()


@pytest.fixture(scope="module")
def sources(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in every format, each made from torch.save's file."""
    directory = tmp_path_factory.mktemp("sources")
    torch.save(values, directory / "made.pt")
    for format, name in NAMES.items():
        convert(directory / "made.pt", directory / name, format=format, on_objects="drop")
    return directory


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_format_becomes_every_other(
    values: dict[str, Any],
    sources: Path,
    tmp_path: Path,
    source: Format,
    format: Format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*steps.buffers_within(SMALLEST))
    path = tmp_path / NAMES[format]
    report = convert(sources / NAMES[source], path, format=format, on_objects="drop")
    assert_same(read_by_us(path), tensors_of(values))
    kept = source in ("dcp", "torch") and format in ("dcp", "torch")
    assert report.objects == (len(OBJECTS) if kept else 0)
    assert report.tensors == len(tensors_of(values))
    if kept:
        with closing(open_checkpoint(str(path))) as made:
            assert made.load_objects(made.objects) == OBJECTS
            assert made.paths["model.blocks.1.w"] == ("model", "blocks", 1, "w")
    assert [entry.name for entry in tmp_path.iterdir()] == [NAMES[format]]  # nothing is left beside it


# --- What others read, and have written


def test_stock_dcp_reads_it(values: dict[str, Any], sources: Path) -> None:
    wanted = {"model": {"large": values["model"]["large"], "blocks": values["model"]["blocks"]}}
    target = {
        "model": {"large": torch.zeros(700, 1000), "blocks": [{"w": torch.zeros(3)}, {"w": torch.zeros(3)}]},
        "epoch": 0,
    }
    dcp.load(target, checkpoint_id=str(sources / "dcp"))
    assert_same(tensors_of(target), tensors_of(wanted))
    assert target["epoch"] == 3
    assert vescale_ckpt.verify(sources / "dcp").ok
    loaded = vescale_ckpt.load(sources / "dcp")
    assert_same(tensors_of(loaded), tensors_of(values))
    assert loaded["optimizer"]["betas"] == (0.9, 0.95)
    assert (sources / "dcp" / ".metadata.index").exists()


def test_the_safetensors_library_reads_it(values: dict[str, Any], sources: Path) -> None:
    assert_same(stock_safetensors.load_file(sources / "one.safetensors"), tensors_of(values))
    ours = ours_safetensors.load_file(sources / "one.safetensors")
    assert_same(ours, tensors_of(values))
    with ours_safetensors.safe_open(sources / "one.safetensors") as file:
        assert same(file.get_slice("model.large")[100:200], values["model"]["large"][100:200])  # by checksums of blocks


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_load_reads_it(values: dict[str, Any], sources: Path, mapped: bool) -> None:
    path = sources / "one.pt"
    loaded = torch.load(path, weights_only=True, mmap=mapped)
    assert_same(tensors_of(loaded), tensors_of(values))
    assert loaded["optimizer"]["names"] == ["a", "b"] and type(loaded["model"]["blocks"]) is list
    assert zipfile.ZipFile(path).testzip() is None
    assert _C.check_archive_at(str(path), 0, path.stat().st_size, -1) == ("", 0, 0, "")


def test_what_others_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*steps.buffers_within(SMALLEST))
    wanted = {"large": torch.randn(600, 500), "transposed": torch.randn(40, 50).t(), "scalar": torch.tensor(3)}
    contiguous = {key: value.contiguous() for key, value in wanted.items()}
    dcp.save(wanted, checkpoint_id=str(tmp_path / "dcp"))
    torch.save(wanted, tmp_path / "a.pt")
    stock_safetensors.save_file(contiguous, tmp_path / "a.safetensors")
    for source in ("dcp", "a.pt", "a.safetensors"):
        convert(tmp_path / source, tmp_path / "made.safetensors", format="safetensors", overwrite=True)
        assert_same(stock_safetensors.load_file(tmp_path / "made.safetensors"), contiguous)


def test_views_of_one_storage_and_tensors_within_objects(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    held = (torch.arange(5), torch.zeros(2, 2))
    saved = {"a": base[2:6], "tied": base[2:6], "rows": base.view(3, 4)[1], "held": held, "later": (base.clone(), 1)}
    torch.save(saved, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", format="torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_same(tensors_of(found), tensors_of(saved))
    assert [torch.equal(x, y) for x, y in zip(found["held"], held, strict=True)] == [True, True]
    assert torch.equal(found["later"][0], base) and list(found) == list(saved)
    assert zipfile.ZipFile(tmp_path / "b.pt").testzip() is None


def test_what_only_torch_knows_of_its_files(tmp_path: Path) -> None:
    """Lazy conjugates, which are mapped, and classes that torch allows beside tensors."""
    lazy = torch.randn(2, 3, dtype=torch.complex64).conj()
    saved = {"lazy": lazy, "strided": torch.arange(6.0).view(2, 3).t(), "size": torch.Size([1, 2]), "own": {"n": 1}}
    torch.save(saved, tmp_path / "a.pt")
    for format in FORMATS:
        convert(tmp_path / "a.pt", tmp_path / NAMES[format], format=format, on_objects="drop")
        wanted = {"lazy": lazy.resolve_conj(), "strided": saved["strided"].contiguous()}
        assert_same(read_by_us(tmp_path / NAMES[format]), wanted)
    assert torch.load(tmp_path / "one.pt", weights_only=True)["size"] == torch.Size([1, 2])
    assert vescale_ckpt.load(tmp_path / "dcp")["own"] == {"n": 1}


def test_modules_and_parameters(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save({"model": module.state_dict(), "p": torch.nn.Parameter(torch.ones(2))}, tmp_path / "a.pt")
    wanted = {f"model.{key}": value for key, value in module.state_dict().items()}
    assert_same(converted(tmp_path / "a.pt"), {**wanted, "p": torch.ones(2)})


def with_pickle(path: Path, data: bytes, storage: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", storage)
        archive.writestr("archive/version", "3")
    return path


def test_pickles_that_lie(tmp_path: Path) -> None:
    def tensor(numbers: tuple[int, ...], key: str = "0") -> bytes:
        start, size, stride = numbers
        stored = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0%sX\x03\0\0\0cpuK\x04tQ" % key.encode()
        box = b"K%c(K%ct(K%ct" % (start, size, stride)
        return b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(" + stored + box + b"\x89NtRs."

    data = np.arange(4, dtype=np.float32).tobytes()
    good = with_pickle(tmp_path / "good.pt", tensor((1, 3, 1)), data)
    assert_same(converted(good), {"w": torch.arange(1.0, 4.0)})
    beyond = with_pickle(tmp_path / "beyond.pt", tensor((2, 3, 1)), data)
    with pytest.raises(UntrustedCheckpointError, match="beyond its storage"):
        converted(beyond)
    absent = with_pickle(tmp_path / "absent.pt", tensor((0, 3, 1), "7"), data)
    with pytest.raises(CheckpointError, match="missing"):
        converted(absent)
    code = with_pickle(tmp_path / "code.pt", b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.", data)
    with pytest.raises(UntrustedCheckpointError, match="needs code"):
        converted(code)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    torch.save({"x": Path("x")}, tmp_path / "code.pt")
    torch.save(torch.ones(1), tmp_path / "tensor.pt")
    np.savez(tmp_path / "array.npz", x=np.ones(1))
    cases = (
        ("absent", CheckpointError, "cannot read"),
        ("empty", CheckpointError, "not a checkpoint"),
        ("code.pt", UntrustedCheckpointError, "needs code"),
        ("tensor.pt", CheckpointError, "no dict"),
        ("array.npz", CheckpointError, "none of torch.save"),
    )
    for name, kind, message in cases:
        with pytest.raises(kind, match=message):
            convert(tmp_path / name, tmp_path / "made", format="dcp")
        assert not (tmp_path / "made").exists()


# --- Names, dtypes, layers


def saved(path: Path, tensors: dict[str, Any]) -> Path:
    torch.save(tensors, path)
    return path


def converted(path: Path, **options: Any) -> Tensors:
    target = path.with_suffix(".made.safetensors")
    convert(path, target, format="safetensors", overwrite=True, **options)
    return stock_safetensors.load_file(target)


def test_keys_and_names(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "opt": {"a": torch.ones(3)}})

    def names(**options: Any) -> list[str]:
        return sorted(converted(path, **options))

    assert names(keys="model") == ["model.a", "model.b"]
    assert names(keys="!opt") == ["model.a", "model.b"]
    assert names(keys=["model", "!*.b"]) == ["model.a"]
    assert names(rename={"model": "", "opt.a": "c"}) == ["a", "b", "c"]
    assert names(rename=str.upper) == ["MODEL.A", "MODEL.B", "OPT.A"]
    with pytest.raises(MissingKeysError, match="nothing"):
        names(keys=["model", "nothing.*"])
    with pytest.raises(ValueError, match=r"'model.a' and 'opt.a'"):
        names(rename=lambda key: key.rpartition(".")[2])


def test_renamed_tensors_are_at_the_top_level(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "x": 1})
    convert(path, tmp_path / "b.pt", format="torch", rename={"model.a": "net.a"})
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert sorted(found) == ["model", "net.a", "x"] and list(found["model"]) == ["b"]


def test_casts_round_to_nearest_even(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*steps.buffers_within(SMALLEST))
    values = {
        "w": torch.randn(500, 400),
        "tie": torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]),  # halfway between bfloat16 values
        "i": torch.arange(3),
        "b": torch.tensor([True]),
        "c": torch.ones(2, dtype=torch.complex64),
        "e": torch.empty(0, 2),
        "s": torch.tensor(0.1, dtype=torch.float64),
    }
    path = saved(tmp_path / "a.pt", values)
    all_cast = {key: value.bfloat16() if value.is_floating_point() else value for key, value in values.items()}
    assert all_cast["tie"].tolist() == [1.0, 1 + 2**-6]
    assert_same(converted(path, dtype=torch.bfloat16), all_cast)
    some = {**values, "w": values["w"].half(), "i": values["i"].int(), "s": values["s"].float()}
    assert_same(converted(path, dtype={"w": "float16", "i": torch.int32, "s": "torch.float32"}), some)
    patterns = {**all_cast, "s": values["s"].float()}
    assert_same(converted(path, dtype={"s": "float32", "*": "bfloat16"}), patterns)
    for bad in (torch.int8, "no_dtype", {"w": "x"}):
        with pytest.raises(ValueError, match="dtype"):
            converted(path, dtype=bad)


def test_layers_are_stacked_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*steps.buffers_within(SMALLEST))
    layers = [torch.randn(50, 300) for _ in range(12)]  # stacked they are more than a piece
    path = saved(tmp_path / "a.pt", {f"layers.{number}.w": layer for number, layer in enumerate(layers)})
    stacked = converted(path, stack={"layers.*.w": "layers.w"})
    assert_same(stacked, {"layers.w": torch.stack(layers)})
    again = converted(saved(tmp_path / "b.pt", stacked), stack={"layers.w": "layers.*.w"}, dtype="bfloat16")
    assert_same(again, {f"layers.{number}.w": layer.bfloat16() for number, layer in enumerate(layers)})
    experts = {f"l.{a}.e.{b}": torch.full((2,), 10.0 * a + b) for a in (0, 1) for b in (0, 1, 2)}
    path = saved(tmp_path / "c.pt", experts)
    both = {f"l.{a}.e": torch.stack([experts[f"l.{a}.e.{b}"] for b in range(3)]) for a in (0, 1)}
    assert_same(converted(path, stack={"l.*.e.*": "l.*.e"}), both)
    assert_same(converted(saved(tmp_path / "d.pt", both), stack={"l.*.e": "l.*.e.*"}), experts)


@pytest.mark.parametrize("source", FORMATS)
def test_layers_are_stacked_from_every_format(tmp_path: Path, source: Format) -> None:
    layers = [torch.randn(2, 3) for _ in range(3)]
    path = saved(tmp_path / "a.pt", {f"w{number}": layer for number, layer in enumerate(layers)})
    convert(path, tmp_path / NAMES[source], format=source, stack={"w*": "w"})
    convert(tmp_path / NAMES[source], tmp_path / "b.safetensors", format="safetensors", stack={"w": "w.*"})
    wanted = {f"w.{number}": layer for number, layer in enumerate(layers)}
    assert_same(stock_safetensors.load_file(tmp_path / "b.safetensors"), wanted)


# --- Objects, shards, what is there


def test_objects_that_have_no_place(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report = convert(sources / "dcp", tmp_path / "a.safetensors", format="safetensors")
    assert report.left_out == sorted(OBJECTS) and "optimizer.betas" in caplog.text
    caplog.clear()
    convert(sources / "dcp", tmp_path / "b.safetensors", format="safetensors", on_objects="drop")
    convert(sources / "dcp", tmp_path / "c.safetensors", format="safetensors", keys="model")
    assert not caplog.text
    with pytest.raises(CheckpointError, match="epoch"):
        convert(sources / "dcp", tmp_path / "d.safetensors", format="safetensors", on_objects="error")
    assert not (tmp_path / "d.safetensors").exists()


def test_shards(tmp_path: Path) -> None:
    values = {f"t{number}": torch.full((100,), float(number)) for number in range(5)}
    path = saved(tmp_path / "a.pt", {**values, "wide": torch.ones(1000)})
    report = convert(path, tmp_path / "many", format="safetensors", max_shard_size="0.8KB")
    names = sorted(entry.name for entry in (tmp_path / "many").iterdir())
    shards = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert names == [*shards, "model.safetensors.index.json"] and report.files == 4
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 400 + 4000
    assert index["weight_map"]["wide"] == shards[3] and index["weight_map"]["t2"] == shards[1]
    for name in shards:
        held = stock_safetensors.load_file(tmp_path / "many" / name)
        assert set(held) == {key for key, file in index["weight_map"].items() if file == name}
    convert(tmp_path / "many", tmp_path / "one", format="safetensors")
    assert [entry.name for entry in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert_same(read_by_us(tmp_path / "one"), {**values, "wide": torch.ones(1000)})
    os.unlink(tmp_path / "many" / shards[1])
    with pytest.raises(CheckpointError, match=shards[1]):
        convert(tmp_path / "many", tmp_path / "two", format="safetensors")


@pytest.mark.parametrize("format", FORMATS)
def test_only_what_may_be_replaced_is(tmp_path: Path, format: Format) -> None:
    path = tmp_path / NAMES[format]
    first, second = saved(tmp_path / "1.pt", {"x": torch.ones(2)}), saved(tmp_path / "2.pt", {"x": torch.zeros(3)})
    convert(first, path, format=format)
    with pytest.raises(CheckpointError, match="overwrite"):
        convert(second, path, format=format)
    assert same(read_by_us(path)["x"], torch.ones(2))
    convert(second, path, format=format, overwrite=True)
    assert same(read_by_us(path)["x"], torch.zeros(3))
    with pytest.raises(CheckpointError, match="itself"):
        convert(path, path, format=format, overwrite=True)
    other = tmp_path / ("made" if path.is_file() else "file")
    if path.is_file():
        path.unlink()
        path.mkdir()
        other = path
    else:
        other.write_text("")
    with pytest.raises(CheckpointError, match="where a"):
        convert(first, other, format=format, overwrite=True)


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"x": torch.ones(2)})
    convert(path, tmp_path / "model", format="safetensors")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        convert(path, tmp_path / "model", format="safetensors", overwrite=True)


# --- Memory


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*steps.buffers_within(SMALLEST))
    values = {"large": torch.randn(3, 1000, 300), "line": torch.arange(500_000), "small": torch.ones(3)}
    path = saved(tmp_path / "a.pt", values)
    taken: list[list[int]] = []
    take, give_back = batches.Buffers.take, batches.Buffers.give_back

    class Counting(batches.Buffers):
        def __init__(self) -> None:
            super().__init__()
            self.out = 0
            taken.append([])

        def take(self) -> torch.Tensor:
            buffer = take(self)
            self.out += len(buffer)
            taken[-1].append(self.out)
            return buffer

        def give_back(self, buffer: torch.Tensor) -> None:
            self.out -= len(buffer)
            give_back(self, buffer)

    monkeypatch.setattr(convert_module, "Buffers", Counting)
    source = path
    for format in FORMATS[:2]:
        convert(source, tmp_path / NAMES[format], format=format)
        assert_same(read_by_us(tmp_path / NAMES[format]), values)
        assert len(taken[-1]) > 20 and max(taken[-1]) <= SMALLEST
        source = tmp_path / NAMES[format]
    stored = dcp.FileSystemReader(str(tmp_path / "dcp")).read_metadata().state_dict_metadata
    assert len(stored["line"].chunks) > 20


# --- What goes wrong


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("writer", ["dcp", "stock dcp", "one.safetensors", "a.pt"])
def test_damage_is_found(tmp_path: Path, writer: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a tensor is read as a whole or in pieces, which need another look at files without tables of blocks."""
    if not whole:
        monkeypatch.setattr(*steps.buffers_within(SMALLEST))
    values = {"w": torch.arange(200_000, dtype=torch.float32), "x": torch.ones(3)}
    path = tmp_path / writer
    if writer == "dcp":
        vescale_ckpt.save(path, values)
    elif writer == "stock dcp":
        dcp.save(values, checkpoint_id=str(path))
    elif writer == "one.safetensors":
        ours_safetensors.save_file(values, path)
    else:
        torch.save(values, path)
    made = tmp_path / "made"
    convert(path, made, format="safetensors")
    assert_same(read_by_us(made), values)
    file = next(path.glob("*.distcp")) if path.is_dir() else path
    flip(file, 8 * file.read_bytes().index(np.arange(150_000, 150_010, dtype=np.float32).tobytes()))
    with pytest.raises(CorruptCheckpointError):
        convert(path, made, format="safetensors", overwrite=True)
    assert_same(read_by_us(made), values)  # what was there still is
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["made", writer])


@pytest.mark.parametrize(
    ("format", "call"),  # torch writes its files itself
    [(format, call) for format in FORMATS for call in ("sync", "write", "allocate")[: 1 if format == "torch" else 3]],
)
def test_a_call_that_fails_leaves_nothing(sources: Path, tmp_path: Path, format: Format, call: str) -> None:
    path = tmp_path / NAMES[format]
    faults.inject(call, errno.ENOSPC)
    with pytest.raises(StorageFullError):
        convert(sources / "dcp", path, format=format, on_objects="drop")
    faults.clear()
    assert list(tmp_path.iterdir()) == []
    convert(sources / "dcp", path, format=format, on_objects="drop")


def test_a_file_of_torch_that_does_not_fit_is_not_left(sources: Path, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(StorageFullError, match="would be too large"):
            convert(sources / "dcp", tmp_path / "one.pt", format="torch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_progress_is_told_of_all_bytes(sources: Path, tmp_path: Path, format: Format) -> None:
    told: list[tuple[int, int]] = []
    convert_module.convert_by_plan(
        sources / "dcp", tmp_path / NAMES[format], format, lambda source: plan(source, None, None, None, None),
        "5GB", "drop", False, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 2_800_000


@pytest.mark.parametrize("format", FORMATS)
def test_a_kill_leaves_nothing_of_that_name(sources: Path, tmp_path: Path, format: Format) -> None:
    path = tmp_path / NAMES[format]

    def child() -> None:
        place = (0, [(torch, "save")]) if format == "torch" else (3, [(batches.Buffers, "take")])
        with mock.patch.object(*steps.buffers_within(SMALLEST)), killed_before(*place):
            convert(sources / "dcp", path, format=format, on_objects="drop")

    pid = fork(child)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not path.exists() and len(list(tmp_path.iterdir())) == 1  # what it has left
    convert(sources / "dcp", path, format=format, on_objects="drop")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert len(read_by_us(path)) == len(read_by_us(sources / "dcp"))


# --- Ranks


def on_a_rank(source: str, path: str, format: Format, options: dict[str, Any]) -> ConvertReport:
    with mock.patch.object(*steps.buffers_within(SMALLEST)):
        return convert(source, path, format=format, on_objects="drop", **options)


@pytest.mark.parametrize("format", FORMATS)
def test_two_ranks_share_the_work(values: dict[str, Any], sources: Path, tmp_path: Path, format: Format) -> None:
    path = tmp_path / ("shards" if format == "safetensors" else NAMES[format])
    options = {"max_shard_size": "1MB"} if format == "safetensors" else {}
    reports = run_ranks(2, on_a_rank, str(sources / "dcp"), str(path), format, options)
    assert_same(read_by_us(path), tensors_of(values))
    assert reports[0].tensors == reports[1].tensors == len(tensors_of(values))
    if format == "dcp":
        files = list(path.glob("*.distcp"))
        sizes = sorted(file.stat().st_size for file in files)
        assert len(files) == 2 and sizes[0] > 1_000_000
        assert vescale_ckpt.load(path)["optimizer"]["names"] == ["a", "b"] and vescale_ckpt.verify(path).ok
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def fails_on_a_rank(source: str, path: str, format: Format, rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        faults.inject("write", errno.ENOSPC)
    convert(source, path, format=format, on_objects="drop", max_shard_size="1MB")


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_what_fails_on_one_rank_fails_on_all(sources: Path, tmp_path: Path, format: Format) -> None:
    found = run_ranks(2, fails_on_a_rank, str(sources / "dcp"), str(tmp_path / "made"), format, 1, check=False)
    assert [type(error) for error in found] == [StorageFullError, StorageFullError]
    assert [error.rank for error in found] == [1, 1]
    assert list(tmp_path.iterdir()) == []


def differs_by_rank(source: str, path: str) -> None:
    convert(source, path, format="safetensors", keys=["model", "epoch"][: 1 + torch.distributed.get_rank()])


def one_says_nonsense(source: str, path: str) -> str:
    format: Any = ("safetensors", "no_format")[torch.distributed.get_rank()]
    with pytest.raises(CheckpointError) as failed:
        convert(source, path, format=format, timeout=60)
    return repr(failed.value)


def _x(key: str) -> str:
    return "x"


def test_ranks_that_would_convert_differently(sources: Path, tmp_path: Path) -> None:
    found = run_ranks(2, differs_by_rank, str(sources / "one.pt"), str(tmp_path / "a.safetensors"), check=False)
    assert all(isinstance(error, CheckpointError) and "differently" in str(error) for error in found)
    with pytest.raises(RanksFailedError) as failed:
        bad = {"rename": _x}
        run_ranks(2, on_a_rank, str(sources / "dcp"), str(tmp_path / "a.safetensors"), "safetensors", bad)
    assert all(isinstance(error, SaveFailedError) for error in failed.value.failures.values())
    found = run_ranks(2, one_says_nonsense, str(sources / "one.pt"), str(tmp_path / "a.safetensors"))
    assert all("SaveFailedError" in error and "no_format" in error for error in found)
    assert list(tmp_path.iterdir()) == []


# --- The command line


def test_the_command_line(
    values: dict[str, Any], sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made.safetensors"
    arguments = ["--keys", "model", "--keys", "!*.torch.*", "--rename", "model=", "--dtype", "bfloat16"]
    arguments += ["--stack", "blocks.*.w=blocks.w"]
    assert main(["convert", str(sources / "dcp"), str(made), *arguments]) == 0
    assert ": 4 tensors, " in capsys.readouterr().out
    model = values["model"]
    wanted = {
        "scalar": model["scalar"],
        "empty": model["empty"],
        "large": model["large"],
        "blocks.w": torch.stack([block["w"] for block in model["blocks"]]),
    }
    assert_same(stock_safetensors.load_file(made), {key: value.bfloat16() for key, value in wanted.items()})
    both = tmp_path / "both.safetensors"
    assert main(["convert", str(made), str(both), "--keys", "empty", "--stack", "empty,empty=x"]) == 2
    assert "no tensor is named 'empty'" in capsys.readouterr().err
    parts = tmp_path / "parts.safetensors"
    state = {"q": torch.randn(3, 2), "k": torch.randn(2, 2)}
    stock_safetensors.save_file(state, parts)
    assert main(["convert", str(parts), str(both), "--stack", "q,k=qk"]) == 0
    assert_same(stock_safetensors.load_file(both), {"qk": torch.cat([state["q"], state["k"]])})
    capsys.readouterr()
    assert main(["convert", str(made), str(made)]) == 2
    assert "itself" in capsys.readouterr().err
    assert main(["convert", str(made), str(tmp_path / "what")]) == 2
    assert "expected --format" in capsys.readouterr().err
    rename = ["--rename", "blocks=b", "--dtype", "large=float32", "--json"]
    assert main(["convert", str(made), str(tmp_path / "a.pt"), *rename]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 4
    loaded = torch.load(tmp_path / "a.pt")
    assert loaded["large"].dtype == torch.float32 and "b.w" in loaded


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "in", {"step": 3})
    for path in (tmp_path / "one.safetensors", tmp_path / "folder"):
        convert(tmp_path / "in", path, format="safetensors", on_objects="drop")
        assert vescale_ckpt.load(path) == {}
    assert stock_safetensors.load_file(tmp_path / "one.safetensors") == {}


@pytest.mark.parametrize("most", ["5GB", 4096])
def test_tied_weights_are_stored_once(tmp_path: Path, most: int | str) -> None:
    weight, memory = torch.randn(100, 20), torch.randn(300)
    tied = {"embed.w": weight, "mid.w": torch.randn(50, 20), "head.w": weight, "format": weight}
    others = {"a": memory[:100], "b": memory[100:200], "a.T": weight.T, "e": torch.empty(0), "f": torch.empty(0)}
    torch.save({**tied, **others}, tmp_path / "in.pt")
    names = {"head.w": "embed.w", "format": "embed.w"}

    convert(tmp_path / "in.pt", tmp_path / "model", format="safetensors", max_shard_size=most)
    assert vescale_ckpt.inspect(tmp_path / "model").aliases == names
    assert vescale_ckpt.verify(tmp_path / "model").ok
    expected = {**tied, **others}
    assert_same(vescale_ckpt.load(tmp_path / "model"), {key: expected[key] for key in expected if key not in names})
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    assert not vescale_ckpt.load(tmp_path / "model", target).missing
    assert_same(target, expected)

    convert(tmp_path / "in.pt", tmp_path / "out.pt", format="torch")
    loaded = torch.load(tmp_path / "out.pt")
    assert_same(loaded, expected)
    assert list(loaded) == list(expected)
    assert len({loaded[key].data_ptr() for key in tied}) == 2

    convert(tmp_path / "in.pt", tmp_path / "dcp", format="dcp")  # stock DCP finds each name
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert_same(target, expected)

    # What is selected, renamed or cast in another way is no tie.
    dtypes = {"head.w": torch.float64}
    convert(
        tmp_path / "in.pt", tmp_path / "part", format="safetensors", keys=["head.w", "format", "mid.w"], dtype=dtypes
    )
    assert_same(
        vescale_ckpt.load(tmp_path / "part"),
        {"mid.w": tied["mid.w"], "head.w": weight.double(), "format": weight},
    )
