"""`NumpyCheckpoint` opens numpy files for conversions and tools: an archive `.npz`, or a folder of `.npy`.

Tensors of dtypes that numpy does not have (bfloat16, float8, ...) are stored as unsigned integers of the same size. The
file `torch_dtypes.json` in the same archive or folder maps their names to torch's dtypes: `{"model.norm": "bfloat16"}`.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
import torch

from .._engine import _C
from .._state.tensor_table import narrowed
from .._storage.open_storage import is_folder, storage_at
from ..errors import CheckpointError, CorruptCheckpointError
from .archive_entries import damage_named, entries, open_archive
from .checkpoint import Checkpoint, Chunk, Read, TensorInfo, whole_in
from .mapped_files import read_mapped
from .seen_files import SeenFiles

SUFFIX = ".npy"
DTYPES_NAME = "torch_dtypes.json"
#: {size: dtype} that replaces a dtype which numpy does not have
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_MOST_ELEMENTS = 1 << 59  # with any dtype, a signed 64-bit integer can count the bytes


class NumpyCheckpoint(Checkpoint):
    """The arrays of an archive or folder.

    Arrays of an archive are read whole, one at a time, and compared with their checksums. Of arrays of a folder only
    what is asked for is read; they have no checksums.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = SeenFiles()
        self._dtypes: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._last: tuple[str, torch.Tensor] | None = None  # the array that was read last, and its key
        self._archive: zipfile.ZipFile | None = None
        self._checksums: dict[str, int] = {}  # of arrays in an archive
        is_npy = is_folder(path)
        self.format, self.root = ("npy", path) if is_npy else ("npz", os.path.dirname(path))
        (self._open_folder if is_npy else self._open_archive)()

    def _open_folder(self) -> None:
        directory = storage_at(self.path)
        if directory.has(DTYPES_NAME):
            beside = os.path.join(self.path, DTYPES_NAME)
            self._dtypes = _loaded_dtypes(directory.read(DTYPES_NAME), beside)
        for name in sorted(name for name in directory.names() if name.endswith(SUFFIX)):
            key, path = unquote(name.removesuffix(SUFFIX)), os.path.join(self.path, name)
            self._seen.look(path)
            with damage_named(path, key):
                array = _mapped(path)
            length = os.path.getsize(path) - array.offset
            self._add(key, array.shape, array.dtype, path, array.offset, length)

    def _open_archive(self) -> None:
        self._seen.look(self.path)
        archive = self._archive = open_archive(self.path)
        found = entries(archive, self.path)
        with damage_named(self.path):
            if any(entry.name == DTYPES_NAME for entry in found):
                self._dtypes = _loaded_dtypes(archive.read(DTYPES_NAME), self.path)
        for entry in found:
            if entry.name.endswith(SUFFIX):
                key = entry.name.removesuffix(SUFFIX)
                with damage_named(self.path, key, entry.offset), archive.open(entry.name) as file:
                    shape, is_in_order, dtype = _header(file)
                    begin = file.tell()
                    file.seek(0)
                    head = _C.crc32(file.read(begin))
                if is_in_order and entry.crc >= 0:  # that of the elements, from those of the header and of both
                    self._checksums[key] = entry.crc ^ _C.crc32_combine(head, 0, entry.bytes - begin)
                offset = entry.offset + begin if entry.stored else -1
                self._add(key, shape, dtype, self.path, offset, entry.bytes - begin)

    def _add(self, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], path: str, offset: int, length: int) -> None:
        """Adds an array. `offset`: -1 if it is compressed."""
        if key in self.tensors:
            raise CheckpointError(f"{key}: {self.path} has two arrays of that name", key=key)
        if length != prod(shape) * dtype.itemsize:
            text = f"its header promises {prod(shape) * dtype.itemsize:,} bytes, {path} holds {length:,}"
            raise CorruptCheckpointError(f"{key}: {text}", key=key, file=path, offset=max(offset, 0))
        self.tensors[key] = whole_in(os.path.basename(path), shape, _torch_dtype(dtype, key, self._dtypes), offset)

    def checksum(self, key: str, chunk: Chunk) -> int:
        return self._checksums.get(key, -1)

    def close(self) -> None:
        self._last = None
        if self._archive is not None:
            self._archive.close()

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            view = narrowed(self._tensor(read.key), read.offsets, read.target.shape)
            if self._archive is None:
                path, begin = self._place(read.key)
                read_mapped(path, read.key, begin, view, read.target)
            else:
                read.target.copy_(view)
        self._seen.check({self._place(read.key)[0] for read in reads})

    def _place(self, key: str) -> tuple[str, int]:
        (chunk,) = self.tensors[key].chunks
        return os.path.join(self.root, chunk.file), chunk.offset

    def _tensor(self, key: str) -> torch.Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None  # frees the old array before the next one is read
            path, offset = self._place(key)
            with damage_named(path, key, max(offset, 0)):
                array = _mapped(path) if self._archive is None else _read_member(self._archive, key)
            self._last = key, torch.from_numpy(array).view(self.tensors[key].dtype)
        return self._last[1]


def _mapped(path: str) -> np.memmap[Any, Any]:
    mapped: np.memmap[Any, Any] = np.load(path, mmap_mode="c")
    return mapped


def _read_member(archive: zipfile.ZipFile, key: str) -> np.ndarray[Any, Any]:
    with archive.open(key + SUFFIX) as file:
        array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # zipfile compares the checksum at the end
        return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the header of a `.npy` file: shape, whether the elements are in C's order, dtype. Raises ValueError if it
    has none."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, by_columns, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version} of the format is for records")
    if not all(size >= 0 for size in shape) or prod(max(1, size) for size in shape) >= _MOST_ELEMENTS:
        raise ValueError(f"no array has shape {shape}")
    return tuple(map(int, shape)), not by_columns, dtype


def _torch_dtype(dtype: np.dtype[Any], name: str, dtypes: Mapping[str, str]) -> torch.dtype:
    """The torch dtype of an array. Raises `CheckpointError` if torch has no tensors of the array's dtype."""
    try:
        stored = torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # the dtype is text, objects, records, or has another byte order
        raise CheckpointError(f"{name}: torch has no tensors of numpy's {dtype}", key=name) from None
    if name not in dtypes:
        return stored
    found = getattr(torch, dtypes[name], None)
    if not isinstance(found, torch.dtype) or found.itemsize != dtype.itemsize or stored not in UNSIGNED.values():
        raise CheckpointError(f"{name}: its dtype should be {dtypes[name]}, which {dtype} cannot be", key=name)
    return found


def _loaded_dtypes(data: bytes, path: str) -> dict[str, str]:
    try:
        dtypes = json.loads(data)
    except ValueError:
        dtypes = None
    if not isinstance(dtypes, dict) or not all(isinstance(value, str) for value in dtypes.values()):
        raise CorruptCheckpointError(f"{path} does not name dtypes", key=None, file=path)
    return dtypes
