"""Against stock DCP: what we write it reads, what it writes we read, and single records are equal byte for byte."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.saves import cause, dcp_load, dcp_save, load_blank, stock_load, stock_save
from harness.states import DTYPES, SHAPES, KiB, MiB, assert_same, bits, blank, layouts, mixed_state, random_tensor
from torch.distributed.checkpoint import _extension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import vescale_ckpt
from vescale_ckpt import (
    CorruptCheckpointError,
    LoadPlanner,
    StorageReader,
    UntrustedCheckpointError,
)
from vescale_ckpt._inspect.diff import diff


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("writer", [dcp_save, stock_save])
def test_every_dtype_in_every_shape(checkpoint: Path, writer: Callable[..., Any], verify: bool) -> None:
    state = {f"{dtype} {shape}": random_tensor(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    writer(checkpoint, state)
    target = blank(state)
    reader = dcp_load(checkpoint, target, verify=verify)
    assert_same(target, state)
    assert reader.last_stats is not None and reader.last_stats.verified is verify
    assert reader.last_stats.fallback_tensors == reader.last_stats.unverified_bytes == 0


@pytest.mark.parametrize("options", [{"thread_count": 4}, {"single_file_per_rank": False}], ids=str)
def test_stock_checkpoint_of_many_files(checkpoint: Path, options: dict[str, Any]) -> None:
    state = mixed_state() | {f"{i}": torch.full((i,), i) for i in range(200)}
    stock_save(checkpoint, state, **options)
    assert_same(load_blank(checkpoint, state), state)


@pytest.mark.parametrize("writer", [dcp_save, stock_save])
def test_metadata_of_more_than_a_mebibyte(checkpoint: Path, writer: Callable[..., Any]) -> None:
    """As of ten thousand tensors: the beginning is checked before the rest is read."""
    state = {f"{i}".rjust(8 * KiB, "k"): torch.full((2,), i) for i in range(150)}
    writer(checkpoint, state)
    assert (checkpoint / ".metadata").stat().st_size > MiB
    assert vescale_ckpt.inspect(checkpoint).tensors.keys() == state.keys()
    assert vescale_ckpt.verify(checkpoint).ok
    (checkpoint / ".metadata.index").unlink(missing_ok=True)  # which answers in place of the metadata
    assert_same(load_blank(checkpoint, state), state)
    assert_same(vescale_ckpt.load(checkpoint), state)


@pytest.mark.parametrize("rows", [64, 12 * KiB], ids=["small", "large"])
@pytest.mark.parametrize("verify", [True, False])
def test_strided_tensors_of_stock(checkpoint: Path, rows: int, verify: bool) -> None:
    # Stock DCP stores some of them with their strides: those take the way over torch.load.
    state = layouts(rows)
    stock_save(checkpoint, state)
    target = blank(state)
    reader = dcp_load(checkpoint, target, verify=verify)
    assert_same(target, state)
    assert reader.last_stats is not None
    assert 0 < reader.last_stats.fallback_tensors < len(state)


def test_transposed_square_of_stock(checkpoint: Path) -> None:
    # The record is as long as that of a plain tensor: only its strides differ.
    square = torch.randn(1000, 1000)
    stock_save(checkpoint, {"small": square[:9, :9].contiguous().t(), "large": square.t()})
    target = {"small": torch.zeros(9, 9), "large": torch.zeros(1000, 1000)}
    for verify in (True, False):
        dcp_load(checkpoint, target, verify=verify)
        assert_same(target, {"small": square[:9, :9].t(), "large": square.t()})


def test_conjugated_and_negated_tensors_of_stock(checkpoint: Path) -> None:
    numbers = torch.randn(300, 200, dtype=torch.complex64)
    state = {"conj": numbers.conj(), "neg": numbers.conj().imag, "conj_t": numbers.conj().t()}
    stock_save(checkpoint, state)
    assert_same(load_blank(checkpoint, state), state)
    dcp_save(checkpoint, state)
    assert_same(stock_load(checkpoint, state), state)


def test_dcp_to_torch_save(checkpoint: Path, tmp_path: Path) -> None:
    state = mixed_state()
    dcp_save(checkpoint, state)
    dcp_to_torch_save(checkpoint, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    # Keys of dictionaries are text in DCP.
    state["optimizer"]["state"] = {str(key): value for key, value in state["optimizer"]["state"].items()}
    assert_same(loaded, state)


def test_torch_save_to_dcp(checkpoint: Path, tmp_path: Path) -> None:
    state = mixed_state()
    torch.save(state, tmp_path / "file.pt")
    torch_save_to_dcp(tmp_path / "file.pt", checkpoint)
    assert_same(load_blank(checkpoint, state), state)


def test_loading_by_keys_alone(checkpoint: Path) -> None:
    state = mixed_state()
    dcp_save(checkpoint, state)
    loaded = _load_state_dict_from_keys({"model", "list", "name"}, storage_reader=StorageReader(checkpoint))
    assert_same(loaded, {key: state[key] for key in ("model", "list", "name")})


# --- Records, byte for byte


def _normal(record: bytes) -> bytes:
    """A record without its serialization id, which torch draws from the checksums in a way of its own."""
    at = record.rfind(b"serialization_id")
    start = record.rfind(b"PK\x03\x04", 0, at) if at >= 0 else -1
    text = bytearray(record)
    # The id: 40 digits, and its checksum in the descriptor behind it and in the directory.
    for match in re.finditer(rb"\d{40}PK\x07\x08", record):
        text[match.start() : match.start() + 40] = b"0" * 40
        text[match.end() : match.end() + 4] = b"\0\0\0\0"
    directory = record.rfind(b"PK\x01\x02")
    text[directory + 16 : directory + 20] = b"\0\0\0\0"
    assert start >= -1
    return bytes(text)


def _torch_record(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _records(path: Path) -> Iterator[tuple[str, bytes]]:
    for index, info in StorageReader(path).read_metadata().storage_data.items():
        with open(path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            yield index.fqn, file.read(info.length)


def test_records_of_tensors_equal_those_of_torch_save(checkpoint: Path) -> None:
    state = {f"{dtype} {shape}": random_tensor(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    shapes = [(1,) * 8, (255,), (256,), (65_535,), (65_536,), (1, 70_000), (70_000, 0), (3 * MiB,), (2, MiB + 1)]
    state |= {f"{shape}": random_tensor(shape, torch.int16) for shape in shapes}
    state |= {f"strided {name}": tensor for name, tensor in layouts(64).items()}
    dcp_save(checkpoint, state)
    seen = set()
    for key, record in _records(checkpoint):
        seen.add(key)
        plain = state[key].clone(memory_format=torch.contiguous_format)
        assert _normal(record) == _normal(_torch_record(plain)), key
    assert seen == set(state)


@pytest.mark.parametrize("value", [None, True, 7, 0.5, "text", [1, (2, {"x": b"y"})], {}, b"", (), set()], ids=repr)
def test_records_of_objects_equal_those_of_torch_save(checkpoint: Path, value: Any) -> None:
    dcp_save(checkpoint, {"object": (value,)})
    ((_, record),) = _records(checkpoint)
    assert _normal(record) == _normal(_torch_record((value,)))


class _Ends:
    """A file that keeps the first and last bytes written to it only."""

    def __init__(self) -> None:
        self.first, self.last, self.size = b"", b"", 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.size < 2 * KiB:
            self.first += bytes(view[: 2 * KiB])
        self.last = (self.last + bytes(view[-2 * KiB :]))[-2 * KiB :]
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        pass


class _Rows(LoadPlanner):
    """Loads a range of rows of a tensor."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.rows = start, stop

    def create_local_plan(self) -> dcp.planner.LoadPlan:
        assert self.metadata is not None
        (key,) = self.state_dict
        chunk = dcp.metadata.ChunkStorageMetadata(torch.Size([self.rows[0]]), torch.Size([self.rows[1] - self.rows[0]]))
        create = dcp.planner_helpers.create_read_items_for_chunk_list
        return dcp.planner.LoadPlan(create(key, self.metadata.state_dict_metadata[key], [chunk]))  # type: ignore[arg-type]

    def lookup_tensor(self, index: dcp.metadata.MetadataIndex) -> torch.Tensor:
        tensor = self.state_dict[index.fqn]
        assert isinstance(tensor, torch.Tensor)
        return tensor[self.rows[0] : self.rows[1]]


def test_record_beyond_32_bits(checkpoint: Path, tmp_path: Path) -> None:
    size = (1 << 32) + 12_345
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("too little room on disk")
    tensor = torch.empty(size, dtype=torch.uint8)  # pages that are never touched take no memory
    ends = torch.arange(100, dtype=torch.uint8)
    tensor[:100] = ends
    tensor[-100:] = ends
    dcp_save(checkpoint, {"tensor": tensor, "after": torch.ones(3), "object": "x"}, sync_files=False)
    stock = _Ends()
    torch.save(tensor, stock)
    info = {index.fqn: info for index, info in StorageReader(checkpoint).read_metadata().storage_data.items()}
    assert info["tensor"].length == stock.size
    with open(checkpoint / info["tensor"].relative_path, "rb") as file:
        file.seek(info["tensor"].offset)
        assert file.read(1 * KiB) == stock.first[: 1 * KiB]
        file.seek(info["tensor"].offset + info["tensor"].length - 2 * KiB)
        assert _normal(file.read(2 * KiB)) == _normal(stock.last)
    # The last rows alone, beyond 32 bits, and what lies behind them in the file.
    target = {"tensor": torch.empty(size, dtype=torch.uint8)}
    dcp.load(target, storage_reader=StorageReader(checkpoint), planner=_Rows(size - 100, size))
    assert_same(target["tensor"][-100:], ends)
    others = {"after": torch.ones(3), "object": "x"}
    assert_same(load_blank(checkpoint, others), others)
    assert_same(stock_load(checkpoint, others), others)
    shutil.rmtree(checkpoint)


# --- Stock checkpoints out of the ordinary


@pytest.fixture
def no_crc32() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


@pytest.mark.usefixtures("no_crc32")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["tensors", "strided tensors", "objects"])
def test_stock_checkpoint_without_crc32(checkpoint: Path, kind: str, verify: bool) -> None:
    state: dict[str, Any] = {
        "tensors": {"small": torch.randn(10), "large": torch.randn(MiB), "empty": torch.empty(0)},
        "strided tensors": {"transposed": torch.randn(30, 40).t()},
        "objects": {"number": 3, "set": {1}, "tuple": (torch.ones(3),)},
    }[kind]
    stock_save(checkpoint, state)
    target = blank(state)
    reader = dcp_load(checkpoint, target, verify=verify)
    assert_same(target, state)
    assert reader.last_stats is not None
    if kind == "tensors" and verify:
        assert reader.last_stats.unverified_bytes == state["small"].nbytes + state["large"].nbytes


def _rewrite_metadata(path: Path, change: Callable[[Metadata], None], pickler: type = pickle.Pickler) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    with open(path / ".metadata", "wb") as file:
        pickler(file).dump(metadata)


def test_tensor_properties_are_written_with_five_fields(checkpoint: Path) -> None:
    states = []

    class Properties(dcp.metadata.TensorProperties):
        def __setstate__(self, state: Any) -> None:
            states.append(state)
            super().__setstate__(state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Properties if name == "TensorProperties" else super().find_class(module, name)

    dcp_save(checkpoint, {"a": torch.ones(3, requires_grad=True), "b": torch.ones(2, dtype=torch.float8_e5m2), "c": 1})
    Unpickler(io.BytesIO((checkpoint / ".metadata").read_bytes())).load()
    assert [len(state) for state in states] == [5, 5]
    assert [state[0] for state in states] == [torch.float32, torch.float8_e5m2]
    assert [state[2] for state in states] == [True, False]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("kind", ["PosixPath", "WindowsPath", "PurePosixPath"])
def test_checkpoint_id_that_is_a_path_of_any_python(checkpoint: Path, module: str, kind: str) -> None:
    # Python 3.13 pickles paths under another module's name, which other versions do not have.
    state = {"a": torch.ones(3), "b": 1}
    stock_save(checkpoint, state)
    marker = "vescale"
    _rewrite_metadata(checkpoint, lambda metadata: setattr(metadata.storage_meta, "checkpoint_id", marker))
    content = (checkpoint / ".metadata").read_bytes()
    text = b"\x8c" + bytes([len(marker)]) + marker.encode()
    assert content.count(text) == 1
    path = b"c" + module.encode() + b"\n" + kind.encode() + b"\n(\x8c\x01/\x8c\x03tmptR"
    body = content.replace(text, path)
    head = body.index(b"\x95") + 1  # the length of protocol 4's frame
    body = body[:head] + struct.pack("<Q", len(body) - head - 8) + body[head + 8 :]
    (checkpoint / ".metadata").write_bytes(body)
    assert_same(load_blank(checkpoint, state), state)


def test_metadata_of_older_torch(checkpoint: Path) -> None:
    # Before 2.7 without transform_descriptors, before 2.9 without version, before 2.3 without storage_meta.
    state = mixed_state()
    stock_save(checkpoint, state)

    def strip(metadata: Metadata) -> None:
        del metadata.version
        del metadata.storage_meta
        for info in metadata.storage_data.values():
            vars(info).pop("transform_descriptors", None)

    _rewrite_metadata(checkpoint, strip)
    assert_same(load_blank(checkpoint, state), state)


def _replace_record(path: Path, record: bytes) -> None:
    """Puts a record in place of the only one of a checkpoint."""

    def change(metadata: Metadata) -> None:
        (info,) = metadata.storage_data.values()
        content = b"x" * 100 + record + b"y" * 100
        (path / info.relative_path).write_bytes(content)
        info.offset, info.length = 100, len(record)

    _rewrite_metadata(path, change)


def _archive(tensor: torch.Tensor, order: str | None = "little", prefix: str = "archive") -> bytes:
    """A record as an archive that zipfile lays out: no alignment, no descriptors, other headers."""
    with zipfile.ZipFile(io.BytesIO(_torch_record(tensor))) as source:
        pickled = source.read("archive/data.pkl")
    body = bits(tensor)
    if order == "big":
        body = tensor.contiguous().numpy().byteswap().tobytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{prefix}/data.pkl", pickled)
        if order is not None:
            archive.writestr(f"{prefix}/byteorder", order)
        archive.writestr(f"{prefix}/data/0", body)
        archive.writestr(f"{prefix}/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize("size", [100, 3 * MiB // 4], ids=["small", "large"])
@pytest.mark.parametrize("order", ["little", "big", None], ids=str)
def test_records_in_another_archive_layout(checkpoint: Path, size: int, order: str | None) -> None:
    state = {"a": torch.randn(size)}
    stock_save(checkpoint, state)
    _replace_record(checkpoint, _archive(state["a"], order, prefix="where" if size == 100 else "archive"))
    assert_same(stock_load(checkpoint, state), state)
    for verify in (True, False):
        assert_same(load_blank(checkpoint, state, verify=verify), state)
        part = {"a": torch.zeros(size)}
        dcp.load(part, storage_reader=StorageReader(checkpoint, verify=verify), planner=_Rows(size // 2, size // 2 + 7))
        assert_same(part["a"][size // 2 : size // 2 + 7], state["a"][size // 2 : size // 2 + 7])


def test_damage_in_another_archive_layout_is_found(checkpoint: Path) -> None:
    state = {"a": torch.randn(1000)}
    stock_save(checkpoint, state)
    record = bytearray(_archive(state["a"]))
    record[record.index(bits(state["a"])) + 2000] ^= 1
    _replace_record(checkpoint, bytes(record))
    with pytest.raises(CheckpointException) as raised:
        load_blank(checkpoint, state)
    error = cause(raised.value)
    assert isinstance(error, CorruptCheckpointError)
    assert error.key == "a"


# --- Stream transforms are stock's own: what they have written is refused by name, and the rest of it is read


class _Rot13(_extension.StreamTransformExtension):
    """The example of DCP's own tests."""

    @staticmethod
    def from_descriptor(version: str) -> _Rot13:
        return _Rot13()

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    def get_descriptor(self) -> str:
        return "stream.rot13/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.RawIOBase):
            def write(self, data: Any) -> int:
                output.write(bytes((byte + 13) % 256 for byte in bytes(data)))
                return len(data)

        return Writer()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes((byte - 13) % 256 for byte in input.read()))


REFUSED = {
    "load": lambda path, state: vescale_ckpt.load(path, blank(state)),
    "load without a state": lambda path, state: vescale_ckpt.load(path),
    "dcp.load": lambda path, state: load_blank(path, state),
    "dcp.load, stock planner": lambda path, state: dcp.load(blank(state), storage_reader=StorageReader(path)),
    "convert": lambda path, state: vescale_ckpt.convert(path, path.with_name("converted"), format="dcp"),
    "diff": lambda path, state: diff(path, path),
    "diff --values": lambda path, state: diff(path, path, with_values=True),
    "inspect": lambda path, state: vescale_ckpt.inspect(path),
}


@pytest.mark.parametrize("kind", ["tensor", "object"])
@pytest.mark.parametrize("way", REFUSED)
def test_what_a_stream_transform_has_written_is_refused_by_name(checkpoint: Path, way: str, kind: str) -> None:
    state = {"the": {"key": torch.arange(300.0)}} if kind == "tensor" else {"the": {"key": {1, 2}}}
    stock_save(checkpoint, state, _extensions=[_Rot13()])
    before = sorted(checkpoint.iterdir())
    with pytest.raises((UntrustedCheckpointError, CheckpointException), match=r"the\.key: .*stream transform"):
        REFUSED[way](checkpoint, state)
    assert sorted(checkpoint.iterdir()) == before


@pytest.mark.parametrize("quick", [False, True])
def test_verify_lists_it_as_refused(checkpoint: Path, quick: bool) -> None:
    stock_save(checkpoint, {"a": torch.ones(3), "text": "x"}, _extensions=[_Rot13()])
    report = vescale_ckpt.verify(checkpoint, quick=quick)
    assert not report.ok and not report.damaged
    assert sorted(refused.key or "" for refused in report.refused) == ["a", "text"]
