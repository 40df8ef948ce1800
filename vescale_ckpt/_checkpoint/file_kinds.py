"""Recognizes files of torch.save and numpy, and writes the advice to convert them for errors of loads."""

from __future__ import annotations

import contextlib
import os
from typing import Literal

from .._storage.open_storage import storage_at

_ZIP, _PICKLE = b"PK\3\4", b"\x80"
_LENGTH_BYTES = 8  # a safetensors file starts with so many bytes of any value; its header follows
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy")


def advice_for_file(path: str) -> str | None:
    """The advice for a file of torch.save or numpy. None for other files. Raises OSError."""
    kind = kind_of_file(path)
    if kind == "archive":
        return f"{path} is a file of torch.save or numpy, which is no checkpoint to load: {_convert(path)}"
    if kind == "pickle":
        return f"{path} seems to be a file of torch.save before torch 1.6: load it with torch.load and save it again"
    return None


def kind_of_file(path: str) -> Literal["archive", "pickle", "other"]:
    """The kind of a file, by its first bytes. Raises OSError."""
    directory, name = os.path.split(path)
    _, begin = storage_at(directory).read_range(name, 0, _LENGTH_BYTES + 1)
    if begin[_LENGTH_BYTES:] == b"{":
        return "other"
    return "archive" if begin.startswith(_ZIP) else "pickle" if begin.startswith(_PICKLE) else "other"


def advice_for_directory(path: str) -> str | None:
    """The advice for a directory without a checkpoint that holds such files. None if it holds none."""
    with contextlib.suppress(OSError):
        names = sorted(name for name in storage_at(path).names() if name.endswith(_SUFFIXES))
        if names:
            found = path if names[0].endswith(".npy") else os.path.join(path, names[0])
            more = f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
            return f"it holds {names[0]}{more}, of another format: {_convert(found)}"
    return None


def _convert(path: str) -> str:
    return f"vescale_ckpt.convert({path!r}, 'checkpoint', format='dcp') makes one that can be loaded"
