"""Reads and lays out numpy files for conversions: an archive `.npz`, or a folder of `.npy`.

Tensors of dtypes that numpy does not have (bfloat16, float8, ...) are stored as unsigned integers of the same size. The
file `torch_dtypes.json` in the same archive or folder maps their names to torch's dtypes: `{"model.norm": "bfloat16"}`.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any
from urllib.parse import quote, unquote

import numpy as np
import torch

from .._engine import _C
from .._engine.errors import named_errors
from .._state.structure import Path
from .._storage.open_storage import is_folder, storage_at
from ..errors import CheckpointError, CorruptCheckpointError
from .archive import ArchiveLayout, Entry, Member, damage_named, entries
from .plan import Output
from .raw_files import Area, RawFiles, RawTensor, byte_offset
from .source import Read, Source, TensorInfo
from .streamed_file import Files, Layout, OutputFile

_SUFFIX = ".npy"
_DTYPES_NAME = "torch_dtypes.json"
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MOST_ELEMENTS = 1 << 59  # of any dtype, fewer bytes than a signed 64-bit integer counts
_CHUNK_BYTES = 4 << 20  # decompressed at a time
_LONGEST_NAME = 255  # bytes, of files


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    bytes: int  #: of the header
    crc: int  #: CRC-32 of the header

    @property
    def data_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def by_columns(self) -> bool:
        """Whether the elements are in Fortran's order, and that differs from C's order."""
        return self.fortran and sum(size != 1 for size in self.shape) > 1 and self.data_bytes > 0


class NumpySource(Source):
    """The arrays of an archive or folder.

    Arrays in C's order are read from the file, arrays in Fortran's order are mapped to memory. Compressed members of an
    archive are decompressed while they are read, once and in order. The checksums of an archive are compared; a folder
    of `.npy` has no checksums.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.object_names: list[str] = []
        self.paths: dict[str, Path] = {}
        self._raw: dict[str, RawTensor] = {}
        self._compressed: dict[str, tuple[str, int]] = {}  # member, and the offset of its data
        self._archive: zipfile.ZipFile | None = None
        self._member: IO[bytes] | None = None  # the compressed member that is being read
        self.format = "npy" if is_folder(path) else "npz"
        self._files = self._open_folder() if is_folder(path) else self._open_archive()

    def _open_folder(self) -> RawFiles:
        names = sorted(name for name in storage_at(self._path).names() if name.endswith(_SUFFIX))
        files = RawFiles([os.path.join(self._path, name) for name in names], self._path)
        dtypes: dict[str, str] = {}
        beside = os.path.join(self._path, _DTYPES_NAME)
        if storage_at(self._path).has(_DTYPES_NAME):
            dtypes = _loaded_dtypes(storage_at(self._path).read(_DTYPES_NAME), beside)
        for number, (name, path) in enumerate(zip(names, files.paths, strict=True)):
            with open(path, "rb") as file:
                header = _header(file, path)
                length = file.seek(0, os.SEEK_END)
            entry = Entry(name, 0, length, 0, True)
            self._add(unquote(name.removesuffix(_SUFFIX)), number, path, header, entry, dtypes)
        return files

    def _open_archive(self) -> RawFiles:
        files = RawFiles([self._path], self._path)
        found = entries(self._path)
        with damage_named(self._path):
            archive = self._archive = zipfile.ZipFile(self._path)
            has_dtypes = any(entry.name == _DTYPES_NAME for entry in found)
            dtypes = _loaded_dtypes(archive.read(_DTYPES_NAME), self._path) if has_dtypes else {}
            for entry in found:
                if not entry.name.endswith(_SUFFIX):
                    continue
                with archive.open(entry.name) as file:
                    header = _header(file, f"{entry.name} in {self._path}")
                self._add(entry.name.removesuffix(_SUFFIX), 0, self._path, header, entry, dtypes)
        return files

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
        dtype = _torch_dtype(header.dtype, key, dtypes)
        info = self.tensors[key] = TensorInfo(header.shape, dtype)
        if not entry.stored:
            if header.by_columns:
                raise CheckpointError(f"{key}: it is compressed column by column: save it in C's order", key=key)
            self._compressed[key] = entry.name, header.bytes
            return
        offset = entry.offset + header.bytes
        crc = entry.crc ^ _C.crc32_combine(header.crc, 0, header.data_bytes) if entry.crc else -1  # of the data
        mapped = None
        if header.by_columns:
            array = np.memmap(path, header.dtype, "c", offset, header.shape, "F")
            mapped = torch.from_numpy(array).view(dtype)
        self._raw[key] = RawTensor(info, offset, Area(file, offset, header.data_bytes, crc), mapped)

    def location(self, key: str) -> tuple[str, int, int]:
        raw = self._raw.get(key)
        return (self._path, -1, -1) if raw is None else self._files.location(raw)

    def close(self) -> None:
        self._raw = {}
        if self._archive is not None:
            self._archive.close()

    def read(self, reads: Sequence[Read]) -> None:
        self._files.read([read for read in reads if read.key in self._raw], self._raw.__getitem__)
        for read in reads:
            if read.key in self._compressed and read.target.numel():
                with damage_named(self._path):
                    self._read_compressed(read)

    def _read_compressed(self, read: Read) -> None:
        name, begin = self._compressed[read.key]
        assert self._archive is not None
        if self._member is None or self._member.name != name:
            self._member = self._archive.open(name)
        self._member.seek(begin + byte_offset(self.tensors[read.key], read.offsets))
        array: Any = read.target.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(array)
        for start in range(0, len(view), _CHUNK_BYTES):
            data = self._member.read(min(_CHUNK_BYTES, len(view) - start))  # zipfile compares the checksum at the end
            if start + len(data) < min(start + _CHUNK_BYTES, len(view)):
                raise CorruptCheckpointError(f"{read.key}: {self._path} is truncated", key=read.key, file=self._path)
            view[start : start + len(data)] = data


def _header(file: IO[bytes], path: str) -> _Header:
    """Reads the header of a `.npy` file. Raises `CorruptCheckpointError` if it has none."""
    read = np.lib.format
    try:
        version = read.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = read.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = read.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} of the format is for records")
        if not all(size >= 0 for size in shape) or prod(max(1, size) for size in shape) >= _MOST_ELEMENTS:
            raise ValueError(f"no array has shape {shape}")
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: {error}", key=None, file=path) from error
    length = file.tell()
    file.seek(0)
    return _Header(tuple(map(int, shape)), bool(fortran), dtype, length, _C.crc32(file.read(length)))


def _torch_dtype(dtype: np.dtype[Any], name: str, dtypes: Mapping[str, str]) -> torch.dtype:
    """The torch dtype of an array. Raises `CheckpointError` if torch has no tensors of the array's dtype."""
    said = dtypes.get(name)
    if said is not None:
        found = getattr(torch, said, None)
        stored = _UNSIGNED.get(dtype.itemsize)
        if not isinstance(found, torch.dtype) or found.itemsize != dtype.itemsize or stored is None or dtype != stored:
            raise CheckpointError(f"{name}: its dtype should be {said}, which {dtype} cannot be", key=name)
        return found
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # text, objects, records, another order of bytes
        raise CheckpointError(f"{name}: torch has no tensors of numpy's {dtype}", key=name) from None


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
    """The archive that `numpy.savez` writes, with each array's bytes at a multiple of 64."""

    def layout() -> Layout:
        members = [Member(output.name + _SUFFIX, _npy_header(output), output) for output in outputs]
        dtypes = _dtypes_to_tell(outputs)
        return ArchiveLayout("", [*members, Member(_DTYPES_NAME, dtypes)] if dtypes else members)

    return Files.one(outputs, layout)


def npy_files(outputs: Sequence[Output]) -> Files:
    """The files that `numpy.save` writes, one for each tensor."""
    files = [
        OutputFile(_file_name(output.name), output.bytes, lambda output=output: _NpyLayout(output))  # type: ignore[misc]
        for output in outputs
    ]
    dtypes = _dtypes_to_tell(outputs)

    def write_dtypes(directory: str) -> None:
        with named_errors(str, directory, len(dtypes)):
            storage_at(directory).write(_DTYPES_NAME, dtypes)

    return Files(files, write_dtypes if dtypes else None)


class _NpyLayout(Layout):
    def __init__(self, output: Output) -> None:
        self._header = _npy_header(output)
        self.bodies = [(output, len(self._header))]
        self.length = len(self._header) + output.bytes

    def format_bytes(self, number: int) -> bytes:
        return self._header


def _npy_header(output: Output) -> bytes:
    dtype, _ = _numpy_dtype(output.dtype, output.name)
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": output.shape}
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, fields)
    return text.getvalue()


def _dtypes_to_tell(outputs: Sequence[Output]) -> bytes:
    """The JSON text with the dtypes that numpy does not have, by tensor. Empty if there are none."""
    dtypes = {output.name: output.dtype for output in outputs if not _numpy_dtype(output.dtype, output.name)[1]}
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    return (json.dumps(names, indent=1, ensure_ascii=False) + "\n").encode() if names else b""


def _numpy_dtype(dtype: torch.dtype, name: str) -> tuple[np.dtype[Any], bool]:
    """The numpy dtype that stores a torch dtype, and whether it is the same dtype. Raises `CheckpointError` if numpy
    has no dtype of that size."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype, True
    except (TypeError, RuntimeError):
        pass
    if dtype.itemsize not in _UNSIGNED:
        raise CheckpointError(f"{name}: numpy has no place for {dtype}", key=name)
    return np.dtype(_UNSIGNED[dtype.itemsize]), False


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
