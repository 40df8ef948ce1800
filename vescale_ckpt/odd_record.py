"""The form of a stored tensor that is not a plain one (transposed, say), without its elements."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import IO, Any, cast

import torch


def wrong_form(path: str, offset: int, length: int, dtype: torch.dtype, sizes: Sequence[int]) -> str:
    """What is wrong with the record of `length` bytes at `offset` if it should hold such a tensor; empty if nothing."""
    try:
        with open(path, "rb") as file:
            record = cast(IO[bytes], _Slice(file, offset, length))
            tensor = torch.load(record, map_location="meta", weights_only=True)
    except Exception as error:  # a strange pickle raises nearly anything
        return f"it cannot be read: {type(error).__name__}: {error}"
    found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    wanted = f"{dtype} {tuple(sizes)}"
    return "" if found == wanted else f"the metadata promises {wanted}, the record holds {found}"


class _Slice(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: io.BufferedReader, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

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
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view[: max(0, min(len(view), self._length - self._at))])
        self._at += count
        return count
