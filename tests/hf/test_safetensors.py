"""Safetensors files: read by the library bit for bit and the other way round, whole or not there, damage named."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors as stock
import safetensors.torch as stock_torch
import torch
from harness import faults
from harness.faults import fault
from harness.files import flip, lock, safetensors_dtypes
from harness.states import random_tensor, same

from vescale_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    MissingKeysError,
    StorageFullError,
    UntrustedCheckpointError,
    safetensors,
    save,
)

State = dict[str, torch.Tensor]

DTYPES = sorted(safetensors_dtypes().values(), key=str)
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 4), (2, 0, 3), (5, 7, 2)]


def all_dtypes() -> State:
    return {
        f"{dtype} {shape}": random_tensor(shape, dtype)
        for dtype in DTYPES
        for shape in SHAPES
        if shape or dtype is not torch.float4_e2m1fn_x2  # two values have no place in no dimension
    }


def state(k: int) -> State:
    """Every value depends on `k`: tensors that travel alone, and small ones."""
    return {
        "large": torch.arange(1_000_000, dtype=torch.float32).add_(k),
        "odd": torch.arange(1_100_001, dtype=torch.int16).add_(k),
        "bias": torch.full((1000,), float(k), dtype=torch.bfloat16),
        "scalar": torch.tensor(0.5 + k),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# --- The library and we


def test_the_library_reads_ours_bit_for_bit(path: Path) -> None:
    values, metadata = all_dtypes(), {"format": "pt", 'é"\\\n': "\x01😀"}
    safetensors.save_file(values, path, metadata)
    assert same(stock_torch.load_file(path), values)
    with stock.safe_open(path, "pt") as file:
        assert {key: text for key, text in file.metadata().items() if key != "vescale_ckpt.crc32"} == metadata
        assert file.keys() == sorted(values)


def test_we_read_the_librarys_bit_for_bit(path: Path) -> None:
    values, metadata = all_dtypes(), {'é"\\\n': "\x01😀"}
    stock_torch.save_file(values, path, metadata)
    assert same(safetensors.load_file(path), values)
    with safetensors.safe_open(path) as file:
        assert file.metadata() == metadata
        assert file.keys() == sorted(values)
        assert same(file.get_tensors(), values)


def test_the_order_is_the_librarys(tmp_path: Path) -> None:
    values = {f"{name} {dtype}": random_tensor((2, 2), dtype) for name in ("b", "a", "é", "B") for dtype in DTYPES}
    stock_torch.save_file(values, tmp_path / "stock")
    safetensors.save_file(values, tmp_path / "ours")
    with stock.safe_open(tmp_path / "stock", "pt") as file:
        expected = file.offset_keys()
    for name in ("stock", "ours"):
        with safetensors.safe_open(tmp_path / name) as file:
            assert file.offset_keys() == expected == list(file.get_tensors())


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}], ids=["none", "empty", "some"])
def test_a_file_without_tensors(path: Path, metadata: dict[str, str] | None) -> None:
    safetensors.save_file({}, path, metadata)
    assert safetensors.load_file(path) == {} == stock_torch.load_file(path)
    with safetensors.safe_open(path) as file:
        assert file.metadata() == ({"format": "pt"} if metadata is None else metadata)
        assert file.keys() == []


def test_only_one_file_is_left_and_it_has_the_usual_rights(path: Path) -> None:
    old = os.umask(0o027)
    try:
        safetensors.save_file(state(1), str(path))
        safetensors.save_file(state(2), path)
    finally:
        os.umask(old)
    assert os.listdir(path.parent) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o640
    assert same(safetensors.load_file(path), state(2))


def test_what_torch_keeps_lazily_is_saved_as_it_looks(path: Path) -> None:
    values = {
        "conjugated": random_tensor((3, 2), torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.rand(3)),
    }
    safetensors.save_file(values, path)
    loaded = safetensors.load_file(path)
    assert same(loaded["conjugated"], values["conjugated"].resolve_conj())
    assert type(loaded["parameter"]) is torch.Tensor and torch.equal(loaded["parameter"], values["parameter"])


def test_a_device_is_what_torch_takes_for_one(path: Path) -> None:
    safetensors.save_file(state(1), path)
    for device in ("cpu", torch.device("cpu")):
        assert same(safetensors.load_file(path, device), state(1))
    assert all(tensor.is_meta for tensor in safetensors.load_file(path, "meta").values())
    with pytest.raises(RuntimeError, match="nonsense"):
        safetensors.load_file(path, "nonsense")


# --- What is refused


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


SHARED = torch.arange(12.0)


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "says"),
    [
        ([torch.zeros(1)], None, ValueError, "a dict"),
        ({"a": 1}, None, ValueError, "a: expected a tensor, got int"),
        ({1: torch.zeros(1)}, None, TypeError, "name of a tensor"),
        ({"a": sparse()}, None, ValueError, "a: sparse"),
        ({"a": torch.zeros(3, 2).t()}, None, ValueError, "a: not contiguous"),
        ({"a": SHARED, "b": SHARED}, None, RuntimeError, "share memory.*a, b"),
        ({"x": SHARED[:7], "y": SHARED[6:], "z": torch.zeros(1)}, None, RuntimeError, "share memory.*: x, y[.]"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, None, ValueError, "a: .*no torch.complex128"),
        ({"__metadata__": torch.zeros(1)}, None, ValueError, "__metadata__: .*metadata"),
        ({"a": torch.zeros(1)}, {"b": 1}, TypeError, "'b': 1"),
        ({"a": torch.zeros(1)}, {1: "b"}, TypeError, "1: 'b'"),
        ({"a": torch.zeros(1)}, ["b"], TypeError, "dict of texts"),
        ({"\ud800": torch.zeros(1)}, None, UnicodeEncodeError, "surrogates"),
        ({"a": torch.zeros(1, device="meta")}, None, CheckpointError, "a: .*meta"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    path: Path, tensors: Any, metadata: Any, error: type[Exception], says: str
) -> None:
    safetensors.save_file(state(1), path)
    with pytest.raises(error, match=says):
        safetensors.save_file(tensors, path, metadata)
    assert os.listdir(path.parent) == [path.name]
    assert same(safetensors.load_file(path), state(1))


def test_parts_of_one_storage_that_do_not_overlap_may_be_saved(path: Path) -> None:
    values = {"front": SHARED[:6], "back": SHARED[6:], "none": SHARED[3:3], "nothing": torch.zeros(0)}
    safetensors.save_file(values, path)
    assert same(stock_torch.load_file(path), values)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        safetensors.save_file(state(1), tmp_path / "nowhere" / "file")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        safetensors.load_file(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        safetensors.load_file(tmp_path)


# --- Ranges

INDEXES: list[Any] = [
    ...,
    (),
    0,
    -1,
    np.int64(1),
    slice(None),
    slice(2, 5),
    slice(-2, None),
    slice(4, 2),
    slice(5, 99),
    slice(None, None, 3),
    slice(1, 6, 2),
    (0, 1, 2),
    (slice(1, 4), 2),
    (..., 1),
    (..., slice(1, 3)),
    (1, ..., slice(None, None, 2)),
    (slice(None), slice(2, 4), slice(1, 2)),
    [0, 3],
    (slice(None), [2, 0]),
    None,
    (None, 1),
    torch.tensor([1, 2]),
    torch.tensor(3),
    True,
]


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_slices_are_those_of_the_tensor(path: Path, library: str) -> None:
    whole = torch.arange(7 * 300 * 1000, dtype=torch.int32).view(7, 300, 1000)
    save = safetensors.save_file if library == "ours" else stock_torch.save_file
    save({"before": torch.ones(77, dtype=torch.uint8), "whole": whole, "scalar": torch.tensor(3.0)}, path)
    with safetensors.safe_open(path, "pt", "cpu") as file, stock.safe_open(path, "pt") as other:
        part, theirs = file.get_slice("whole"), other.get_slice("whole")
        assert part.get_shape() == theirs.get_shape() == [7, 300, 1000]
        assert part.get_dtype() == theirs.get_dtype() == "I32"
        for index in INDEXES:
            assert same(part[index], whole[index]), index
            assert same(part[index], theirs[index]), index
        assert file.get_slice("scalar")[...] == 3 == file.get_slice("scalar")[()]
        for wrong in (7, -8, (0, 0, 0, 0), (0, 300), 1.0, slice(None, None, -1)):
            with pytest.raises((IndexError, TypeError, ValueError)) as expected:
                whole[wrong]
            with pytest.raises(expected.type):
                part[wrong]
        with pytest.raises(IndexError):
            file.get_slice("scalar")[:]


def test_a_slice_of_pairs_of_values_counts_as_torch_does(path: Path) -> None:
    pairs = random_tensor((4, 6), torch.float4_e2m1fn_x2)
    safetensors.save_file({"a": pairs}, path)
    with safetensors.safe_open(path) as file:
        part = file.get_slice("a")
        assert part.get_shape() == [4, 12] and part.get_dtype() == "F4"
        assert same(part[1:3, 2:4].contiguous(), pairs.view(torch.uint8)[1:3, 2:4].contiguous().view(pairs.dtype))


def neighbours(path: Path) -> State:
    """Saves tensors of 64 KiB, one of 9 MiB between them, and some of odd sizes."""
    tensors = {f"{n:03}": torch.full((1 << 15,), n, dtype=torch.int16) for n in range(300)}
    tensors |= {"0large": torch.arange(9 << 18, dtype=torch.int32), "odd": torch.arange(333, dtype=torch.int16)}
    tensors |= {"odd too": torch.arange(1_000_001, dtype=torch.int8), "none": torch.empty(0, 3)}
    safetensors.save_file(tensors, path)
    return tensors


@pytest.mark.parametrize("by_library", [False, True])
def test_each_loaded_tensor_has_a_storage_of_its_own(path: Path, by_library: bool) -> None:
    tensors = neighbours(path)
    if by_library:
        stock_torch.save_file(tensors, path)
    loaded = safetensors.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert same(tensor, tensors[name]) and tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor._is_view()
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in loaded.values() if tensor.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))


def test_a_closed_file_and_a_missing_tensor_are_named(path: Path) -> None:
    safetensors.save_file(state(1), path)
    with safetensors.safe_open(path) as file:
        for call in (file.get_tensor, file.get_slice):
            with pytest.raises(MissingKeysError, match="nope"):
                call("nope")
    for closed in (file.keys, file.metadata, file.offset_keys, file.get_tensors, file.__enter__):
        with pytest.raises(CheckpointError, match="closed"):
            closed()
    with pytest.raises(ValueError, match="flax"):
        safetensors.safe_open(path, "flax")  # type: ignore[arg-type]


def test_an_open_file_stays_the_one_that_it_was(path: Path) -> None:
    safetensors.save_file(state(1), path)
    with safetensors.safe_open(path) as file:
        safetensors.save_file(state(2), path)
        assert same(file.get_tensors(), state(1))


# --- Damage


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_damaged_tensor_is_named_and_the_others_load(path: Path) -> None:
    safetensors.save_file(state(1), path)
    header, _ = parts_of(path)
    begin = path.stat().st_size - max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_")
    at = begin + header["odd"]["data_offsets"][0] + 1_000_000
    flip(path, 8 * at + 2)
    with pytest.raises(CorruptCheckpointError) as found:
        safetensors.load_file(path)
    assert (found.value.key, found.value.file) == ("odd", str(path))
    assert found.value.offset <= at < found.value.offset + (256 << 10)
    assert not same(safetensors.load_file(path, verify=False), state(1))
    with safetensors.safe_open(path) as file:
        assert same(file.get_tensor("large"), state(1)["large"])
        assert same(file.get_slice("odd")[:1000], state(1)["odd"][:1000])
        with pytest.raises(CorruptCheckpointError, match="odd"):
            file.get_slice("odd")[499_900:500_100]


def entry(dtype: str, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: list[tuple[Any, int, type[CheckpointError], str]] = [
    (b"{}x", 0, CorruptCheckpointError, "padding"),
    ({"a": entry("U9", [2], [0, 2])}, 2, CorruptCheckpointError, "unknown dtype"),
    (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2,
     UntrustedCheckpointError, '"a" twice'),
    ({"a": entry("U8", [1 << 40, 1 << 40], [0, 2])}, 2, UntrustedCheckpointError, "overflows"),
    ({"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [3, 5])}, 5, UntrustedCheckpointError, "nobody"),
    ({"a": entry("U8", [1 << 40], [0, 1 << 40])}, 2, CorruptCheckpointError, "truncated"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "data_bytes", "error", "says"), HOSTILE, ids=[row[3] for row in HOSTILE])
def test_a_hostile_header_is_refused_by_name(
    path: Path, header: Any, data_bytes: int, error: type[CheckpointError], says: str
) -> None:
    path.write_bytes(with_header(header, bytes(data_bytes)))
    for load in (safetensors.load_file, safetensors.safe_open, functools.partial(safetensors.load_file, verify=False)):
        with pytest.raises(error, match=says) as found:
            load(path)
        assert str(path) in str(found.value)
    with contextlib.suppress(OverflowError), pytest.raises(stock.SafetensorError):
        stock_torch.load_file(path)


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "says"),
    [
        ("F6_E2M3", [4], 3, "no dtype for F6_E2M3"),
        ("F4", [2, 1], 1, "whole number"),
        ("U8", [0, 1 << 62, 1 << 62], 0, "no shape"),
    ],
)
def test_what_torch_cannot_hold_is_named_when_it_is_asked_for(
    path: Path, dtype: str, shape: list[int], size: int, says: str
) -> None:
    path.write_bytes(
        with_header({"fine": entry("U8", [1], [0, 1]), "odd": entry(dtype, shape, [1, 1 + size])}, bytes(9))[
            : -9 + 1 + size or None
        ]
    )
    with safetensors.safe_open(path) as file:
        assert file.get_tensor("fine").tolist() == [0]
        assert file.get_slice("odd").get_shape() == shape
        with pytest.raises(CheckpointError, match=f"odd.*{says}"):
            file.get_tensor("odd")
    with pytest.raises(CheckpointError, match=f"odd.*{says}"):
        safetensors.load_file(path)


def test_checksums_that_another_tool_copied_along_do_not_count(tmp_path: Path, path: Path) -> None:
    safetensors.save_file(state(1), path)
    with stock.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert "vescale_ckpt.crc32" in metadata
    stock_torch.save_file(state(2), tmp_path / "again", metadata)
    assert same(safetensors.load_file(tmp_path / "again"), state(2))
    safetensors.save_file(state(3), tmp_path / "ours", metadata)
    assert same(safetensors.load_file(tmp_path / "ours"), state(3))
    with safetensors.safe_open(tmp_path / "ours") as file:
        assert file.metadata() == {"format": "pt"}


# --- Failures


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (call, errno.EIO)
        for call in ("open", "write", "allocate", "truncate", "sync", "sync_directory", "rename", "space")
    ]
    + [("write", errno.ENOSPC), ("allocate", errno.ENOSPC)],
)
def test_a_call_that_fails_fails_the_save_and_leaves_the_old_file(path: Path, call: str, error: int) -> None:
    safetensors.save_file(state(1), path)
    failures = 0
    for number in range(50):
        with fault(call, error, skip=number):
            try:
                safetensors.save_file(state(2), path)
            except CheckpointError as failure:
                failures += 1
                assert os.strerror(error) in str(failure) and str(path.parent) in str(failure)
                assert isinstance(failure, StorageFullError) == (error == errno.ENOSPC)
                after = [state(1), state(2)] if call == "sync_directory" else [state(1)]
            else:
                after = [state(2)]
            reached = faults.calls_seen(call) > number
        assert any(same(safetensors.load_file(path), values) for values in after)
        assert os.listdir(path.parent) == [path.name]
        if not reached:
            break
        safetensors.save_file(state(1), path)
    assert failures or call == "allocate"


def test_a_save_leaves_alone_what_another_one_is_writing(path: Path) -> None:
    going_on = path.with_name(f"{path.name}.tmp.1.0")
    going_on.write_bytes(b"data")
    left_over = path.with_name(f"{path.name}.tmp.1.1")
    left_over.write_bytes(b"data")
    other = path.with_name(f"other.{path.name}.tmp.1.1")
    other.write_bytes(b"data")
    going_on_lock = lock(going_on)
    assert going_on_lock is not None
    safetensors.save_file(state(1), path)
    assert set(path.parent.iterdir()) == {path, going_on, other}
    going_on_lock.release()


def test_the_names_in_headers_are_those_of_the_format(tmp_path: Path) -> None:
    """docs/format.md names them: files of older versions are read by them, whatever modules are called."""
    tied, checksums = (".".join(("vescale_ckpt", name)) for name in ("tied", "crc32"))
    weight = torch.arange(6.0)
    save(tmp_path / "export", {"a": weight, "b": weight}, format="safetensors")
    (file,) = (tmp_path / "export").glob("*.safetensors")
    with file.open("rb") as written:
        header = json.loads(written.read(int.from_bytes(written.read(8), "little")))
    assert json.loads(header["__metadata__"][tied]) == {"b": "a"}
    assert checksums in header["__metadata__"]


def test_the_module_is_light_and_its_calls_import_nothing_more(tmp_path: Path) -> None:
    code = """
import sys, torch
before = set(sys.modules)
from vescale_ckpt import safetensors
safetensors.save_file({"a": torch.arange(6.0)}, sys.argv[1])
assert torch.equal(safetensors.load_file(sys.argv[1])["a"], torch.arange(6.0))
with safetensors.safe_open(sys.argv[1]) as file:
    assert file.get_slice("a")[2:3].tolist() == [2.0]
print(len(sys.modules.keys() - before))
"""
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "file"], capture_output=True, text=True, check=True)
    assert 0 < int(ran.stdout) <= 60, "torch.distributed's tensors and checkpoints are hundreds"
