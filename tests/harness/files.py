"""Checkpoints as files: what lies where in them, read raw, and bits turned around."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from benchmarks.harness.page_cache import drop_file
from vescale_ckpt._checkpoint.native import metadata_file
from vescale_ckpt._engine.dtype_codes import SAFETENSORS_DTYPES
from vescale_ckpt._storage import locks


@dataclass(frozen=True)
class Record:
    """One stored tensor or object, bytes of its file."""

    key: str
    path: Path
    begin: int
    end: int
    body: range  #: the tensor's bytes or the object's pickle


def read_metadata(directory: Path) -> Metadata:
    return metadata_file.read_metadata(str(directory))


def rewrite_metadata(directory: Path, metadata: Metadata) -> None:
    """As it is, without what our writer would put right."""
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def records(directory: Path) -> list[Record]:
    found = []
    for index, info in read_metadata(directory).storage_data.items():
        path = directory / info.relative_path
        data = path.read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            entry = archive.getinfo(next((n for n in names if n.endswith("/data/0")), names[0]))
            header = entry.header_offset
        name, extra = struct.unpack_from("<HH", data, header + 26)
        start = info.offset + header + 30 + name + extra
        found.append(
            Record(index.fqn, path, info.offset, info.offset + info.length, range(start, start + entry.file_size))
        )
    return found


def named_by_index(directory: Path) -> set[str]:
    """The data files that the index beside the metadata names."""
    index = metadata_file.read_index(str(directory))
    assert index is not None
    return set(index.files)


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.distcp"))


def only_named_files(directory: Path) -> bool:
    """Whether the directory holds `.metadata`, perhaps its index, and exactly what it names."""
    named = {info.relative_path for info in read_metadata(directory).storage_data.values()}
    return set(os.listdir(directory)) - {".metadata.index"} == named | {".metadata"}


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of a file turned around; turned back at the end."""
    flip(path, bit)
    try:
        yield
    finally:
        flip(path, bit)


def flip(path: Path, bit: int | None = None) -> None:
    """Turns a bit of a file around; None: one in its middle."""
    bit = path.stat().st_size // 2 * 8 if bit is None else bit
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1) or b"\0"  # of an empty file, which gets one
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def drop_from_cache(path: Path) -> None:
    """The file's next readers read its disk."""
    drop_file(path)


def ranks_alone(directory: Path) -> Path:
    """A folder with the checkpoints of two ranks of this package that saved without collectives: metadata, an index and
    a data file each."""
    with tarfile.open(Path(__file__).parent.with_name("api") / "ranks_alone.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "ranks_alone"


def data_file_names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.suffix == ".distcp")


def lock(path: Path) -> Any:
    """Takes the lock by which a save marks a file that it is writing; None if another has it. It has `release()`."""
    return locks.lock(str(path))


def drop_dead_locks(path: Path) -> None:
    """What a save does about locks of failed ones of its directory."""
    locks.drop_dead_locks(str(path))


def locks_are_held() -> bool:
    """Whether this process holds any lock of a file."""
    return bool(list(locks._held))


def share(path: Path) -> Any:
    """Takes the lock by which readers keep a file from being removed; None if it is gone. It has `release()`."""
    return locks.share(str(path))


def safetensors_dtypes() -> dict[str, torch.dtype]:
    """Those that this torch has, by their names in headers."""
    return dict(SAFETENSORS_DTYPES)
