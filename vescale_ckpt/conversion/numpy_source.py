"""Files of numpy: an archive `.npz`, or a folder of `.npy`."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
import torch

from .. import _C
from .._storage.directory import directory_at, is_folder
from ..errors import CheckpointError, CorruptCheckpointError
from ..flatten import Path
from .numpy_dtypes import DTYPES_NAME, load_dtypes, torch_dtype
from .raw_source import Area, RawFiles, RawTensor
from .source import Read, TensorInfo
from .zip_file import Entry, damage_named, entries

SUFFIX = ".npy"
_FARTHEST = 1 << 59  # elements; of any dtype these are fewer bytes than 63 bits count
_SKIP_BYTES = 4 << 20  # at a time, of what is decompressed for nothing


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    bytes: int  #: of the header
    crc: int  #: CRC-32 of these

    @property
    def data_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class _Stream:
    """A compressed member while it is read from its beginning on."""

    name: str
    file: IO[bytes]
    at: int = 0


class NumpySource:
    """Arrays in rows, as C has them, are read from where they lie; those in columns are mapped to memory. Members of an
    archive that are compressed are decompressed as they are read: in order, once.

    An archive's checksums are compared. A folder of `.npy` has none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.object_names: list[str] = []
        self.paths: dict[str, Path] = {}
        self._raw: dict[str, RawTensor] = {}
        self._columns: dict[str, tuple[str, int, _Header, Area]] = {}
        self._compressed: dict[str, tuple[str, _Header]] = {}  # member and its header
        self._archive: zipfile.ZipFile | None = None
        self._stream: _Stream | None = None
        if is_folder(path):
            self._open_folder()
        else:
            self._open_archive()

    def _open_folder(self) -> None:
        names = sorted(name for name in directory_at(self._path).names() if name.endswith(SUFFIX))
        paths = [os.path.join(self._path, name) for name in names]
        dtypes: dict[str, str] = {}
        if directory_at(self._path).has(DTYPES_NAME):
            content = directory_at(self._path).read(DTYPES_NAME)
            dtypes = load_dtypes(content, os.path.join(self._path, DTYPES_NAME))
        for number, (name, path) in enumerate(zip(names, paths, strict=True)):
            with open(path, "rb") as file:
                header = _header(file, path)
                length = file.seek(0, os.SEEK_END)
            entry = Entry(name, 0, length, 0, True)
            self._add(unquote(name.removesuffix(SUFFIX)), number, path, header, entry, dtypes)
        self._files = RawFiles(paths, self._path)

    def _open_archive(self) -> None:
        found = entries(self._path)
        with damage_named(self._path):
            archive = self._archive = zipfile.ZipFile(self._path)
            has_dtypes = any(entry.name == DTYPES_NAME for entry in found)
            dtypes = load_dtypes(archive.read(DTYPES_NAME), self._path) if has_dtypes else {}
            for entry in found:
                if not entry.name.endswith(SUFFIX):
                    continue
                with archive.open(entry.name) as file:
                    header = _header(file, f"{entry.name} in {self._path}")
                self._add(entry.name.removesuffix(SUFFIX), 0, self._path, header, entry, dtypes)
        self._files = RawFiles([self._path], self._path)

    def _add(self, key: str, file: int, path: str, header: _Header, entry: Entry, dtypes: dict[str, str]) -> None:
        if key in self.tensors:
            raise CheckpointError(f"{key}: {self._path} has two arrays of that name", key=key)
        if entry.bytes != header.bytes + header.data_bytes:
            raise CorruptCheckpointError(
                f"{key}: its header promises {header.data_bytes:,} bytes, {path} holds {entry.bytes - header.bytes:,}",
                key=key,
                file=path,
                offset=entry.offset,
            )
        info = self.tensors[key] = TensorInfo(header.shape, torch_dtype(header.dtype, key, dtypes))
        offset = entry.offset + header.bytes
        crc = entry.crc ^ _C.crc32_combine(header.crc, 0, header.data_bytes) if entry.crc else -1  # of the data alone
        area = Area(file, offset, header.data_bytes, crc)
        if header.fortran and sum(size != 1 for size in header.shape) > 1 and header.data_bytes:
            if not entry.stored:
                raise CheckpointError(f"{key}: it is compressed column by column: save it in C's order", key=key)
            self._columns[key] = path, offset, header, area
        elif entry.stored:
            self._raw[key] = RawTensor(info, offset, area)
        else:
            self._compressed[key] = entry.name, header

    def close(self) -> None:
        self._stream = None
        if self._archive is not None:
            self._archive.close()

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        return {}

    def read(self, reads: Sequence[Read]) -> None:
        self._files.read([read for read in reads if read.key in self._raw], self._raw.__getitem__)
        for read in reads:
            if read.target.numel() == 0:
                continue
            if read.key in self._columns:
                self._read_columns(read)
            elif read.key in self._compressed:
                self._read_compressed(read)

    def _read_columns(self, read: Read) -> None:
        path, offset, header, area = self._columns[read.key]
        self._files.verify(area, read.key)
        array = np.memmap(path, header.dtype, "r", offset, header.shape, "F")
        box = tuple(slice(a, a + n) for a, n in zip(read.offsets, read.target.shape, strict=True))
        _bytes_of(read.target).view(header.dtype).reshape(read.target.shape)[...] = array[box]

    def _read_compressed(self, read: Read) -> None:
        name, header = self._compressed[read.key]
        archive, target = self._archive, read.target
        assert archive is not None
        begin = (
            header.bytes
            + sum(offset * prod(header.shape[dim + 1 :]) for dim, offset in enumerate(read.offsets))
            * header.dtype.itemsize
        )
        with damage_named(self._path):
            stream = self._stream
            if stream is None or stream.name != name or stream.at > begin:
                stream = self._stream = _Stream(name, archive.open(name))
            while stream.at < begin:
                stream.at += _some(stream.file.read(min(_SKIP_BYTES, begin - stream.at)), read.key, self._path)
            view = memoryview(_bytes_of(target))
            done = 0
            while done < len(view):
                data = stream.file.read(min(_SKIP_BYTES, len(view) - done))
                view[done : done + _some(data, read.key, self._path)] = data
                done += len(data)
            stream.at += done
            if stream.at == header.bytes + header.data_bytes:
                stream.file.read(1)  # at its end the checksum is compared


def _bytes_of(target: torch.Tensor) -> Any:
    return target.reshape(-1).view(torch.uint8).numpy()


def _some(data: bytes, key: str, path: str) -> int:
    if not data:
        raise CorruptCheckpointError(f"{key}: {path} is truncated", key=key, file=path)
    return len(data)


def _header(file: IO[bytes], path: str) -> _Header:
    """Raises `CorruptCheckpointError` for what is none."""
    read = np.lib.format
    try:
        version = read.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = read.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = read.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} of the format is for records")
        if not all(0 <= size < _FARTHEST for size in shape) or prod(max(1, size) for size in shape) >= _FARTHEST:
            raise ValueError(f"no array has shape {shape}")
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: {error}", key=None, file=path) from error
    length = file.tell()
    file.seek(0)
    return _Header(tuple(map(int, shape)), bool(fortran), dtype, length, _C.crc32(file.read(length)))
