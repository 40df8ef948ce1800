"""`.metadata` and its index as C++ writes them: equal to what DCP makes of the same state, readable by its own reader,
refused when damaged."""

from __future__ import annotations

import itertools
import math
import pickle
import struct
import zlib
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.states import mixed_state
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vescale_ckpt._checkpoint.native import metadata_file
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.rows import CODE_DTYPES, dtype_code

Row = tuple[str, Any, ChunkStorageMetadata | None]  #: name, its entry in state_dict_metadata, the chunk


def pack(rows: list[Row]) -> bytes:
    packed = []
    for key, stored, chunk in rows:
        if chunk is None:
            packed.append(array("q", (0, 0)).tobytes())
            continue
        properties = stored.properties
        code, flags = dtype_code(properties.dtype, key), int(properties.requires_grad)
        head = 2 | code << 8 | flags << 16 | len(stored.size) << 32
        size = math.prod(chunk.sizes) * properties.dtype.itemsize
        packed.append(array("q", (head, size, *stored.size, *chunk.offsets, *chunk.sizes)).tobytes())
    return _C.pack_inventory([key for key, _, _ in rows], packed, 0)


def rows_of(metadata: Metadata) -> list[tuple[Row, _StorageInfo]]:
    rows: list[tuple[Row, _StorageInfo]] = []
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            rows.append(((key, stored, None), metadata.storage_data[MetadataIndex(key)]))
        else:
            for chunk in stored.chunks:
                rows.append(((key, stored, chunk), metadata.storage_data[MetadataIndex(key, chunk.offsets)]))
    return rows


def place(info: _StorageInfo, files: list[str]) -> tuple[int, int, int, int]:
    if info.relative_path not in files:
        files.append(info.relative_path)
    return files.index(info.relative_path), info.offset, info.length, getattr(info, "crc", -1)


def write(metadata: Metadata, paths: list[bytes] | None = None) -> tuple[bytes, bytes]:
    """The contents of both files for what `metadata` describes, as one rank would have written it."""
    rows = rows_of(metadata)
    plan = _C.GlobalPlan([pack([row for row, _ in rows])], "balanced")
    files: list[str] = []
    places = array("q")
    for item in memoryview(plan.local_plan(0)).cast("q")[::4]:
        places.extend(place(rows[item][1], files))
    if paths is None:
        names = metadata.planner_data or {}
        paths = [_C.pack_paths(list(names), list(names.values())) if metadata.planner_data is not None else b""]
    meta = metadata.storage_meta
    return _C.checkpoint_files(plan.catalog(0), [places.tobytes()], [files], paths, meta.checkpoint_id, meta.save_id)


def assert_equal(actual: Metadata, expected: Metadata) -> None:
    assert actual == expected
    assert list(actual.state_dict_metadata) == list(expected.state_dict_metadata)
    hints = {index: index.index for index in actual.storage_data}
    assert hints == {index: index.index for index in expected.storage_data}
    for index, info in actual.storage_data.items():
        assert getattr(info, "crc", None) == getattr(expected.storage_data[index], "crc", None)
        assert index.offset is None or type(index.offset) is torch.Size
    for stored in actual.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            assert type(stored.size) is torch.Size
            assert all(type(chunk.offsets) is torch.Size is type(chunk.sizes) for chunk in stored.chunks)


def whole(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TensorStorageMetadata:
    return sharded(shape, (1,) * len(shape), dtype)


def sharded(
    shape: tuple[int, ...], parts: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> TensorStorageMetadata:
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size, count in zip(shape, parts, strict=True):
        cuts = [size * i // count for i in range(count + 1)]
        boxes = [((*offset, begin), (*sizes, end - begin)) for offset, sizes in boxes for begin, end in pairwise(cuts)]
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def placed(stored: dict[str, Any], planner_data: Any = None, crc: bool = True) -> Metadata:
    """Metadata with a place for everything, none like another."""
    data: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in stored.items():
        chunks = value.chunks if isinstance(value, TensorStorageMetadata) else [None]
        for hint, chunk in enumerate(chunks):
            number = len(data)
            info = _StorageInfo(f"__{number % 3}_0.distcp", number << (number % 40), 100 + number)
            if crc:
                info.crc = number * 0x9E3779B1 & 0xFFFFFFFF  # type: ignore[attr-defined]
            data[MetadataIndex(key) if chunk is None else MetadataIndex(key, chunk.offsets, hint)] = info
    meta = dcp.metadata.StorageMeta(checkpoint_id="/some/where", save_id="the save")
    return Metadata(stored, planner_data=planner_data, storage_data=data, storage_meta=meta, version="1.0.0")


def many() -> Metadata:
    stored: dict[str, Any] = {f"tensor {dtype}": whole("", (3, 5), dtype) for dtype in CODE_DTYPES.values()}
    stored |= {
        "object": BytesStorageMetadata(),
        "scalar": whole("", ()),
        "empty": whole("", (0, 4)),
        "rows": sharded((4096, 8), (1500, 1)),
        "grid": sharded((60, 40, 4), (6, 8, 2), torch.bfloat16),
        "five": sharded((2, 2, 2, 2, 8), (2, 1, 2, 1, 4), torch.int64),
    }
    return placed(stored, {key: ("a", 0, key) for key in stored})


STRANGE_NAMES = ("", "ключ 🍓", "a\nb\0c", "x" * 100_000, "\ud800 alone", "c" * 255, "d" * 256)


# --- `.metadata`


def stock_checkpoint(directory: Path, state: dict[str, Any]) -> Metadata:
    dcp.save(state, storage_writer=FileSystemWriter(directory))
    with (directory / ".metadata").open("rb") as file:
        metadata: Metadata = pickle.load(file)
    metadata.storage_meta.checkpoint_id = str(directory)  # type: ignore[union-attr]
    return metadata


def test_equal_to_what_dcp_writes(checkpoint: Path) -> None:
    state = mixed_state() | {"parameter": torch.nn.Parameter(torch.ones(3)), "nested": [{"a": 1}, torch.zeros(2)]}
    expected = stock_checkpoint(checkpoint, state)
    content, _ = write(expected)
    actual = pickle.loads(content)
    assert actual.storage_meta.save_id == expected.storage_meta.save_id  # type: ignore[union-attr]
    assert_equal(actual, expected)
    assert list(actual.planner_data) == list(actual.state_dict_metadata)
    assert_equal(metadata_file.loads(content, "here"), expected)


@pytest.mark.parametrize(
    "metadata",
    [
        many(),
        placed({}),
        placed({}, {}),
        placed({"object": BytesStorageMetadata(), "other": BytesStorageMetadata()}, crc=False),
        placed({"tensor": whole("", (3,))}, {"tensor": ()}),
        placed({"tensor": sharded((5000,), (2500,))}, crc=False),
        placed({name: whole("", (3,)) for name in STRANGE_NAMES}, {name: (name, -1, 2**40) for name in STRANGE_NAMES}),
        placed({"n" * 5000: sharded((4096, 8), (1000, 1))}, {"n" * 5000: ("n" * 5000,)}),
    ],
    ids=["many", "nothing", "nothing, flattened", "objects", "whole", "no crc", "strange names", "long name"],
)
def test_unpickles_to_what_went_in(metadata: Metadata) -> None:
    content, _ = write(metadata)
    assert_equal(pickle.loads(content), metadata)
    assert_equal(pickle._loads(content), metadata)  # type: ignore[attr-defined]  # in Python, which checks frames
    assert_equal(metadata_file.loads(content, "here"), metadata)


def test_not_larger_than_what_python_writes() -> None:
    metadata = many()
    content, _ = write(metadata)
    assert len(content) <= len(metadata_file.dumps(metadata))


@pytest.mark.parametrize("element", [1.5, None, 2**63, ("a",)])
def test_paths_of_what_dcp_has_no_paths_of(element: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        _C.pack_paths(["a"], [(element,)])


def test_paths_without_names_are_refused() -> None:
    with pytest.raises(ValueError):
        _C.pack_paths(["a"], [])
    with pytest.raises(_C.EngineError, match="paths of keys"):
        write(placed({}), [b"x"])


# --- The index


def places_by_plan(index: _C.Index, rows: list[Row]) -> list[tuple[str, int, int, int | None]]:
    """Where the index says that each row is, found by asking for all of it."""
    plan = index.plan_load(pack(rows))
    assert (plan.missing, plan.mismatched, plan.uncovered) == ([], [], [])
    found: dict[int, tuple[str, int, int, int | None]] = {}

    def add(item: int, file: int, offset: int, length: int, crc: int) -> None:
        assert item not in found
        found[item] = plan.files[file], offset, length, None if crc < 0 else crc

    words, at = memoryview(plan.reads).cast("q"), 0
    while at < len(words):
        ndim = words[at + 6]
        add(*words[at : at + 5])
        _, stored, chunk = rows[words[at]]
        assert chunk is not None
        assert CODE_DTYPES[words[at + 5]] == stored.properties.dtype
        numbers = words[at + 7 : at + 7 + 4 * ndim].tolist()
        assert numbers == [*chunk.sizes, *[0] * ndim, *chunk.sizes, *[0] * ndim]
        at += 7 + 4 * ndim
    for at in range(0, len(objects := memoryview(plan.objects).cast("q")), 5):
        add(*objects[at : at + 5])
    return [found[item] for item, (_, _, chunk) in enumerate(rows) if chunk is None or math.prod(chunk.sizes)]


def assert_index_is(index: _C.Index, metadata: Metadata) -> None:
    rows = rows_of(metadata)
    assert set(index.keys()) == set(metadata.state_dict_metadata)
    assert len(index) == len(metadata.state_dict_metadata)
    expected = [
        (info.relative_path, info.offset, info.length, getattr(info, "crc", None))
        for (_, _, chunk), info in rows
        if chunk is None or math.prod(chunk.sizes)
    ]
    assert places_by_plan(index, [row for row, _ in rows]) == expected
    assert set(index.files) == {info.relative_path for _, info in rows}


class SecondReader:
    """Reads an index as docs/format.md says, and nothing else."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        header = struct.unpack_from("<8s2I2Q2IQ12Q2I", data)
        magic, version, piece, length, self.pickle_bytes, self.pickle_crc, dtypes, checksums, *rest = header
        *self.tables, sums_crc, header_crc = rest
        assert (magic, version, piece, length) == (b"VSCKIDX1", 1, 4096, len(data))
        assert zlib.crc32(data[:148]) == header_crc
        assert zlib.crc32(data[checksums:]) == sums_crc
        pieces = [zlib.crc32(data[at : at + piece]) for at in range(piece, checksums, piece)]
        assert pieces == [sum_ for (sum_,) in struct.iter_unpack("<I", data[checksums:])]
        ends = [0, *(self.element(0, "<Q", i)[0] for i in range(self.tables[1]))]
        strings = [self.text(begin, end - begin) for begin, end in pairwise(ends)]
        self.save_id, self.dtypes, self.files = strings[0], strings[1 : 1 + dtypes], strings[1 + dtypes :]

    def element(self, table: int, layout: str, number: int) -> tuple[Any, ...]:
        at, count = self.tables[2 * table : 2 * table + 2]
        assert at % 8 == 0 <= number < count
        return struct.unpack_from(layout, self.data, at + number * struct.calcsize(layout))

    def text(self, begin: int, size: int) -> str:
        at, count = self.tables[2:4]
        assert begin + size <= count
        return self.data[at + begin : at + begin + size].decode("utf-8", "surrogatepass")

    def find(self, name: str) -> tuple[Any, ...]:
        slots, crc = self.tables[5], zlib.crc32(name.encode("utf-8", "surrogatepass"))
        for slot in range(crc % slots, crc % slots + slots):
            found, key = self.element(2, "<2I", slot % slots)
            assert key, "an empty slot"
            if found == crc and self.key(key - 1)[0] == name:
                return self.key(key - 1)
        raise AssertionError("not there")

    def key(self, number: int) -> tuple[Any, ...]:
        begin, *rest, size, ndim, dtype, kind, flags = self.element(3, "<4Q3I2H", number)
        return self.text(begin, size), *rest, ndim, dtype, kind, flags

    def metadata(self) -> tuple[dict[str, Any], dict[MetadataIndex, Any]]:
        stored: dict[str, Any] = {}
        data: dict[MetadataIndex, Any] = {}
        for number in range(self.tables[7]):
            name, dims, first, count, ndim, dtype, kind, flags = self.find(self.key(number)[0])
            words = (self.element(4, "<q", i)[0] for i in itertools.count(dims))
            size, *boxes = (torch.Size(itertools.islice(words, ndim)) for _ in range(1 + 2 * count))
            chunks = [ChunkStorageMetadata(*box) for box in zip(boxes[::2], boxes[1::2], strict=True)]
            stored[name] = BytesStorageMetadata()
            if kind:
                properties = TensorProperties(getattr(torch, self.dtypes[dtype]), requires_grad=bool(flags & 1))
                stored[name] = TensorStorageMetadata(properties, size, chunks)
            for place in range(count):
                offset, length, crc, file = self.element(5, "<2Q2I", first + place)
                index = MetadataIndex(name, chunks[place].offsets) if kind else MetadataIndex(name)
                has_crc, file = not file >> 31, file & ~(1 << 31)
                data[index] = (self.files[file], offset, length, crc if has_crc else None)
            level = [(chunk.offsets, chunk.sizes) for chunk in chunks]
            while len(level) > 16:
                level = [self.bound(level[i : i + 16], ndim) for i in range(0, len(level), 16)]
                for box in level:
                    assert tuple(itertools.islice(words, 2 * ndim)) == (*box[0], *box[1])
        return stored, data

    @staticmethod
    def bound(boxes: list[Any], ndim: int) -> Any:
        boxes = [box for box in boxes if math.prod(box[1])]
        low = [min((offset[dim] for offset, _ in boxes), default=0) for dim in range(ndim)]
        high = [max((offset[dim] + size[dim] for offset, size in boxes), default=0) for dim in range(ndim)]
        return low, [end - begin for begin, end in zip(low, high, strict=True)]


@pytest.mark.parametrize(
    "metadata",
    [many(), placed({}), placed({name: whole("", (3,)) for name in STRANGE_NAMES}, crc=False)],
    ids=["many", "nothing", "strange names"],
)
def test_index_is_as_documented(metadata: Metadata) -> None:
    content, index = write(metadata)
    reader = SecondReader(index)
    assert reader.save_id == "the save"
    assert content[reader.pickle_bytes :] == struct.pack(
        "<8s2I", b"VSCKMDT1", reader.pickle_bytes, zlib.crc32(content[: reader.pickle_bytes])
    )
    assert reader.pickle_crc == zlib.crc32(content[: reader.pickle_bytes])
    stored, data = reader.metadata()
    assert stored == metadata.state_dict_metadata
    assert data == {
        index: (info.relative_path, info.offset, info.length, getattr(info, "crc", None))
        for index, info in metadata.storage_data.items()
    }


def test_open_index_outlives_the_file(tmp_path: Path) -> None:
    _, index = write(metadata := many())
    path = tmp_path / "index"
    path.write_bytes(index)
    opened = _C.Index.open(str(path))
    path.unlink()
    assert_index_is(opened, metadata)


def test_index_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    _, index = write(metadata := many())
    path = tmp_path / "index"
    path.write_bytes(index)
    opened = _C.Index.open(str(path))
    with path.open("r+b") as file:
        file.truncate(8192)
    with pytest.raises(_C.EngineError) as caught:
        assert_index_is(opened, metadata)
    assert caught.value.kind == "corrupt"


@pytest.mark.parametrize(
    "places", [b"", bytes(31), bytes(64), struct.pack("4q", 1, 0, 0, -1), struct.pack("4q", 0, 0, 0, -2)]
)
def test_rows_with_other_places_are_refused(places: bytes) -> None:
    with pytest.raises(_C.EngineError) as caught:
        _C.Index.from_rows(pack([("a", None, None)]), places, ["f"])
    assert caught.value.kind == "invalid"
