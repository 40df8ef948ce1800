"""Reads records that the engine does not know, for loads and `verify`: wrapper subclasses and non-contiguous tensors.

Stock DCP writes such records, of transposed tensors for instance.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections.abc import Sequence
from typing import IO, Any, cast

import torch

from .._engine import _C
from .._engine.wrapper_tensors import is_wrapper
from .._storage.open_storage import storage_at

_REBUILD = "torch._utils _rebuild_wrapper_subclass"  # torch.save writes this name in front of a wrapper's class


def _crc_of_values(tensor: torch.Tensor) -> int:
    """Returns the CRC-32 of a tensor's elements in order, as saves of this package compute it."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return _C.crc32_of_memory(plain.data_ptr(), plain.nbytes)


def tensor_in_archive(data: bytes, sizes: Sequence[int], crc: int, *, weights_only: bool = True) -> torch.Tensor:
    """Returns the tensor of shape `sizes` in a record. Stock DCP stores a shard without elements as it is held: FSDP2
    may hold (0, 0) where the metadata has (3, 0).

    `crc`: the CRC-32 of its elements, or of the record of a wrapper; -1 if it is unknown or not checked.

    Raises ValueError for anything else. The message is the predicate of a sentence about the record.
    """
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except Exception as error:  # a strange pickle raises nearly anything
        raise ValueError(f"cannot be read: {error}") from error
    if isinstance(tensor, torch.Tensor) and not tensor.numel() and 0 in sizes and not is_wrapper(tensor):
        return tensor.new_empty(sizes)
    if not isinstance(tensor, torch.Tensor) or tensor.shape != torch.Size(sizes):
        found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"holds {found}, where metadata promises shape {tuple(sizes)}")
    if crc >= 0 and crc != (_C.crc32(data) if is_wrapper(tensor) else _crc_of_values(tensor)):
        raise ValueError("holds other values than were saved")
    return tensor


def wrong_form(path: str, offset: int, length: int, dtype: torch.dtype, sizes: Sequence[int], crc: int = -1) -> str:
    """Returns what is wrong with the record of `length` bytes at `offset`, which should hold such a tensor. Empty if it
    is sound.

    `crc`: the CRC-32 of its elements; -1: unknown. Elements are read only if it is known. A wrapper with a known CRC-32
    counts as wrong, because the CRC-32 of its archive was compared before and differs.
    """
    if stored_class(path, offset, length):  # the archive is sound; the class may be unknown here
        return "" if crc < 0 else "it holds other values than were saved"
    try:
        tensor = torch.load(_record(path, offset, length), map_location="meta" if crc < 0 else "cpu", weights_only=True)
    except OSError:  # a read failed
        raise
    except Exception as error:  # a strange pickle raises nearly anything
        return f"it cannot be read: {type(error).__name__}: {error}"
    found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    expected = f"{dtype} {tuple(sizes)}"
    empty = isinstance(tensor, torch.Tensor) and tensor.dtype == dtype and not tensor.numel() and 0 in sizes
    if found != expected and not empty:
        return f"the metadata promises {expected}, the record holds {found}"
    return "" if crc < 0 or _crc_of_values(tensor) == crc else "it holds other values than were saved"


def stored_class(path: str, offset: int, length: int) -> str:
    """Returns the class of the wrapper in the record at `offset`, without loading it. Empty if it holds no wrapper."""
    try:
        with zipfile.ZipFile(_record(path, offset, length)) as archive:
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        names = [str(value) for code, value, _ in pickletools.genops(pickled) if code.name == "GLOBAL"]
        return names[names.index(_REBUILD) + 1].replace(" ", ".")
    except OSError:  # a read failed
        raise
    except Exception:  # the record is damaged, or holds no wrapper
        return ""


def _record(path: str, offset: int, length: int) -> IO[bytes]:
    return cast(IO[bytes], _Slice(path, offset, length))


class _Slice(io.RawIOBase):
    """A range of a file's bytes, as a file."""

    def __init__(self, path: str, begin: int, length: int) -> None:
        directory, self._name = os.path.split(path)
        self._directory = storage_at(directory)
        self._begin, self._length, self._at = begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._length - self._at))
        _, data = self._directory.read_range(self._name, self._begin + self._at, length)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
