"""Reads and writes numpy files for conversions: an archive `.npz`, or a folder of `.npy`.

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
from urllib.parse import quote, unquote

import numpy as np
import torch

from .._engine.errors import named_errors
from .._read.seen_files import SeenFiles
from .._state.tensor_table import narrowed
from .._storage.open_storage import is_folder, storage_at
from ..errors import CheckpointError, CorruptCheckpointError
from .archive import damage_named, entries, open_archive
from .plan import Output
from .source import Read, Source, TensorInfo
from .streamed_file import Files, OutputFile, Save, read_whole, streamed

_SUFFIX = ".npy"
_DTYPES_NAME = "torch_dtypes.json"
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_MOST_ELEMENTS = 1 << 59  # of any dtype, fewer bytes than a signed 64-bit integer counts
_LONGEST_NAME = 255  # bytes, of files


class NumpySource(Source):
    """The arrays of an archive or folder.

    Arrays of an archive are read whole, one at a time, and compared with their checksums. Those of a folder are mapped
    to memory, and have none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = SeenFiles()
        self._locations: dict[str, tuple[str, int, int]] = {}
        self._dtypes: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._last: tuple[str, torch.Tensor] | None = None  # the array that was read last, and its key
        self._archive: zipfile.ZipFile | None = None
        self.format = "npy" if is_folder(path) else "npz"
        (self._open_folder if is_folder(path) else self._open_archive)()

    def _open_folder(self) -> None:
        directory = storage_at(self._path)
        if directory.has(_DTYPES_NAME):
            beside = os.path.join(self._path, _DTYPES_NAME)
            self._dtypes = _loaded_dtypes(directory.read(_DTYPES_NAME), beside)
        for name in sorted(name for name in directory.names() if name.endswith(_SUFFIX)):
            key, path = unquote(name.removesuffix(_SUFFIX)), os.path.join(self._path, name)
            self._seen.look(path)
            with damage_named(path, key):
                array = _mapped(path)
            length = os.path.getsize(path) - array.offset
            self._add(key, array.shape, array.dtype, (path, array.offset, length))

    def _open_archive(self) -> None:
        self._seen.look(self._path)
        archive = self._archive = open_archive(self._path)
        found = entries(archive, self._path)
        with damage_named(self._path):
            if any(entry.name == _DTYPES_NAME for entry in found):
                self._dtypes = _loaded_dtypes(archive.read(_DTYPES_NAME), self._path)
        for entry in found:
            if entry.name.endswith(_SUFFIX):
                key = entry.name.removesuffix(_SUFFIX)
                with damage_named(self._path, key, entry.offset), archive.open(entry.name) as file:
                    shape, dtype = _header(file)
                    begin = file.tell()
                self._add(key, shape, dtype, (self._path, entry.offset + begin, entry.bytes - begin))
                if not entry.stored:
                    self._locations[key] = self._path, -1, -1

    def _add(self, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], location: tuple[str, int, int]) -> None:
        path, offset, length = location
        if key in self.tensors:
            raise CheckpointError(f"{key}: {self._path} has two arrays of that name", key=key)
        if length != prod(shape) * dtype.itemsize:
            text = f"its header promises {prod(shape) * dtype.itemsize:,} bytes, {path} holds {length:,}"
            raise CorruptCheckpointError(f"{key}: {text}", key=key, file=path, offset=offset)
        self.tensors[key] = TensorInfo(shape, _torch_dtype(dtype, key, self._dtypes))
        self._locations[key] = location

    def location(self, key: str) -> tuple[str, int, int]:
        return self._locations[key]

    def close(self) -> None:
        self._last = None
        if self._archive is not None:
            self._archive.close()

    def read(self, reads: Sequence[Read]) -> None:
        paths = {self._locations[read.key][0] for read in reads}
        self._seen.check(paths)  # mapped memory of a file that was cut short would end the process
        for read in reads:
            read.target.copy_(narrowed(self._tensor(read.key), read.offsets, read.target.shape))
        self._seen.check(paths)

    def _tensor(self, key: str) -> torch.Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None  # one at a time
            path, offset, _ = self._locations[key]
            with damage_named(path, key, max(offset, 0)):
                array = _mapped(path) if self._archive is None else _read_member(self._archive, key)
            self._last = key, torch.from_numpy(array).view(self.tensors[key].dtype)
        return self._last[1]


def _mapped(path: str) -> np.memmap[Any, Any]:
    mapped: np.memmap[Any, Any] = np.load(path, mmap_mode="c")
    return mapped


def _read_member(archive: zipfile.ZipFile, key: str) -> np.ndarray[Any, Any]:
    with archive.open(key + _SUFFIX) as file:
        array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # to the end, where zipfile compares the checksum
        return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Reads the header of a `.npy` file. Raises ValueError if it has none."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version} of the format is for records")
    if not all(size >= 0 for size in shape) or prod(max(1, size) for size in shape) >= _MOST_ELEMENTS:
        raise ValueError(f"no array has shape {shape}")
    return tuple(map(int, shape)), dtype


def _torch_dtype(dtype: np.dtype[Any], name: str, dtypes: Mapping[str, str]) -> torch.dtype:
    """The torch dtype of an array. Raises `CheckpointError` if torch has no tensors of the array's dtype."""
    try:
        stored = torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # text, objects, records, another order of bytes
        raise CheckpointError(f"{name}: torch has no tensors of numpy's {dtype}", key=name) from None
    if name not in dtypes:
        return stored
    found = getattr(torch, dtypes[name], None)
    if not isinstance(found, torch.dtype) or found.itemsize != dtype.itemsize or stored not in _UNSIGNED.values():
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


# --- Writing


def npz_file(outputs: Sequence[Output]) -> Files:
    """The archive that `numpy.savez` writes. One tensor at a time is in memory."""

    def save(stream: IO[bytes], source: Source) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for output in outputs:
                with archive.open(zipfile.ZipInfo(output.name + _SUFFIX), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _array(read_whole(output, source)))
            if dtypes := _dtypes_to_tell(outputs):
                archive.writestr(zipfile.ZipInfo(_DTYPES_NAME), dtypes)

    return Files.streamed(outputs, save)


def npy_files(outputs: Sequence[Output]) -> Files:
    """The files that `numpy.save` writes, one for each tensor."""
    files = [
        OutputFile(_file_name(output.name), output.bytes, streamed([output], _save_of(output))) for output in outputs
    ]
    dtypes = _dtypes_to_tell(outputs)

    def write_dtypes(directory: str) -> None:
        with named_errors(str, directory, len(dtypes)):
            storage_at(directory).write(_DTYPES_NAME, dtypes)

    return Files(files, write_dtypes if dtypes else None)


def _save_of(output: Output) -> Save:
    return lambda stream, source: np.lib.format.write_array(stream, _array(read_whole(output, source)))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (
        tensor if _numpy_has(tensor.dtype) else tensor.view(_UNSIGNED[tensor.itemsize])
    ).numpy()
    return found


def _numpy_has(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except (TypeError, RuntimeError):
        return False
    return True


def _dtypes_to_tell(outputs: Sequence[Output]) -> bytes:
    """The JSON text with the dtypes that numpy does not have, by tensor. Empty if there are none."""
    dtypes = {output.name: str(output.dtype) for output in outputs if not _numpy_has(output.dtype)}
    names = {name: dtype.removeprefix("torch.") for name, dtype in dtypes.items()}
    return (json.dumps(names, indent=1, ensure_ascii=False) + "\n").encode() if names else b""


def _file_name(name: str) -> str:
    """The file name of a tensor in a folder: its name, percent-encoded where a file name cannot hold a character.

    Raises `CheckpointError` if it is too long.
    """
    quoted = quote(name, safe=" !#$&'()+,;=@[]{}^~`*:<>?|\"\\")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) + len(_SUFFIX) > _LONGEST_NAME:
        raise CheckpointError(f"{name}: its name is too long for a file's: save an .npz, or rename it", key=name)
    return quoted + _SUFFIX
