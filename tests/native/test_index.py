"""`.metadata.index` is as docs/format.md says: who knows nothing else reads in it all that `.metadata` says."""

from __future__ import annotations

import itertools
import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.files import read_metadata
from harness.ranks import run_ranks
from harness.states import DTYPES, StridedShard, random_tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import vescale_ckpt
from vescale_ckpt import SavePlanner, StorageWriter
from vescale_ckpt._checkpoint.native import metadata_file


class SecondReader:
    """Reads an index as docs/format.md says, and nothing else."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        header = struct.unpack_from("<8s2IQ2I14Q", data)
        magic, version, dtypes, self.pickle_bytes, self.pickle_crc, zero, *self.tables = header
        assert (magic, version, zero) == (b"VSCKIDX1", 3, 0)
        assert zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")
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

    def key(self, number: int) -> tuple[Any, ...]:
        begin, *rest, size, ndim, dtype, kind, flags = self.element(2, "<4Q3I2H", number)
        return self.text(begin, size), *rest, ndim, dtype, kind, flags

    def column(self, number: int, chunk: int) -> int:
        base, step, codes, values, width, value_count = self.element(4, "<4Q2I", number)
        found: int = (base + step * chunk) % 2**64
        if not width:
            return found
        at, shift = divmod(chunk * width, 64)
        words = [self.element(5, "<Q", codes + at + i)[0] for i in range(1 + (shift + width > 64))]
        code = sum(word << 64 * i for i, word in enumerate(words)) >> shift & (1 << width) - 1
        assert not value_count or code < value_count
        return found + (self.element(5, "<Q", values + code)[0] if value_count else code)

    def metadata(self) -> tuple[dict[str, Any], dict[MetadataIndex, Any]]:
        stored: dict[str, Any] = {}
        data: dict[MetadataIndex, Any] = {}
        for number in range(self.tables[5]):
            name, dims, first, count, ndim, dtype, kind, flags = self.key(number)
            words = (self.element(3, "<q", i)[0] for i in itertools.count(dims))
            size, *boxes = (torch.Size(itertools.islice(words, ndim)) for _ in range(1 + 2 * count))
            chunks = [ChunkStorageMetadata(*box) for box in zip(boxes[::2], boxes[1::2], strict=True)]
            stored[name] = BytesStorageMetadata()
            if kind:
                properties = TensorProperties(getattr(torch, self.dtypes[dtype]), requires_grad=bool(flags & 1))
                stored[name] = TensorStorageMetadata(properties, size, chunks)
            for chunk in range(count):
                file, offset, length = (self.column(3 * number + column, chunk) for column in range(3))
                index = MetadataIndex(name, chunks[chunk].offsets) if kind else MetadataIndex(name)
                crc = None if file >> 31 else self.element(6, "<I", first + chunk)[0]
                data[index] = (self.files[file & ~(1 << 31)], offset, length, crc)
        return stored, data


STRANGE_NAMES = ("", "ключ 🍓", "a\nb\0c", "x" * 100_000, "c" * 255, "d" * 256)
STATES: dict[str, dict[str, Any]] = {
    "all kinds": {f"tensor {dtype}": random_tensor((3, 5), dtype) for dtype in DTYPES}
    | {"object": {"a": 1}, "scalar": torch.tensor(1.0), "empty": torch.empty(0, 4), "rows": torch.ones(4096, 8)}
    | {"parameter": torch.nn.Parameter(torch.ones(3)), "one more": [1, torch.ones(2)]},
    "nothing": {},
    "strange names": {name: torch.ones(3) for name in STRANGE_NAMES},
}


def _check(directory: Path) -> None:
    content, metadata = (directory / ".metadata").read_bytes(), read_metadata(directory)
    reader = SecondReader((directory / ".metadata.index").read_bytes())
    assert metadata.storage_meta is not None and reader.save_id == metadata.storage_meta.save_id
    crc = zlib.crc32(content[: reader.pickle_bytes])
    assert content[reader.pickle_bytes :] == struct.pack("<8s2I", b"VSCKMDT1", reader.pickle_bytes, crc)
    assert reader.pickle_crc == crc
    stored, data = reader.metadata()
    assert stored == metadata.state_dict_metadata
    assert data == {
        index: (info.relative_path, info.offset, info.length, getattr(info, "crc", None))
        for index, info in metadata.storage_data.items()
    }


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("options", [{}, {"checksums": False, "single_file_per_rank": False}], ids=["", "without crc"])
def test_index_is_as_documented(checkpoint: Path, name: str, options: dict[str, bool]) -> None:
    writer = StorageWriter(checkpoint, **options)
    dcp.save(dict(STATES[name]), storage_writer=writer, planner=SavePlanner(), no_dist=True)
    _check(checkpoint)


def _save_many_chunks(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(9000.0).view(4500, 2), mesh, [StridedShard(0, split_factor=150)])
    vescale_ckpt.save(directory, {"rows": rows, "replicated": torch.ones(2)})


def test_many_chunks(checkpoint: Path) -> None:
    run_ranks(2, _save_many_chunks, checkpoint)
    assert len(read_metadata(checkpoint).state_dict_metadata["rows"].chunks) == 300  # type: ignore[union-attr]
    _check(checkpoint)


def test_an_index_of_another_version_is_done_without(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, {"weight": torch.ones(3)})
    index = checkpoint / ".metadata.index"
    data = bytearray(index.read_bytes())
    struct.pack_into("<I", data, 8, 2)
    struct.pack_into("<I", data, len(data) - 4, zlib.crc32(data[:-4]))
    index.write_bytes(data)
    assert metadata_file.read_index(str(checkpoint)) is None
    assert torch.equal(vescale_ckpt.load(checkpoint)["weight"], torch.ones(3))
