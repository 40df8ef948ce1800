"""Where a conversion writes to, and what may be there before."""

from __future__ import annotations

import os
import re
from typing import Literal

from .._storage.directory import directory_at, stat_of
from .._storage.directory import is_folder as is_directory
from ..errors import CheckpointError

Format = Literal["dcp", "safetensors", "torch", "npz", "npy"]
_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors", ".npz": "npz", ".pt": "torch", ".pth": "torch", ".bin": "torch"
}  # fmt: skip
_OF_FORMAT = {
    "safetensors": re.compile(r".*\.safetensors|.*\.safetensors\.index\.json"),
    "npy": re.compile(r".*\.npy|torch_dtypes\.json"),
}


def format_of(path: str) -> Format | None:
    """What the name of a destination stands for."""
    return _SUFFIXES.get(os.path.splitext(path)[1])


def is_folder(path: str, format: Format) -> bool:
    """Whether a destination is a folder rather than a file."""
    return format in ("dcp", "npy") or (format == "safetensors" and not path.endswith(".safetensors"))


def check(source: str, path: str, format: Format, overwrite: bool) -> None:
    """Raises `CheckpointError` if what is there must not be replaced. With `overwrite`, one file may be by another, a
    checkpoint by the next, and a folder by another of the same format if nothing else is in it."""
    directory, name = os.path.split(path.rstrip("/") or path)
    if not directory_at(directory).has(name):
        return
    is_there = is_directory(path)
    if _same(source, path):
        raise CheckpointError(f"{path} would be converted onto itself", path=path)
    if is_there != is_folder(path, format):
        kinds = ("a file", "a folder") if is_folder(path, format) else ("a folder", "a file")
        raise CheckpointError(f"{path} is {kinds[0]}, where {kinds[1]} would be written", path=path)
    names = directory_at(path).names() if is_there else [""]
    if names and not overwrite:
        raise CheckpointError(f"{path} exists: it is only replaced with overwrite=True", path=path)
    pattern = _OF_FORMAT.get(format) if is_there else None
    others = sorted(name for name in names if pattern is not None and not pattern.fullmatch(name))
    if others:
        raise CheckpointError(f"{path} holds {others[0]}, too, and is not replaced: remove it first", path=path)


def goes_into_place(path: str, format: Format) -> bool:
    """Whether a new checkpoint takes the place of one in the same directory, as saves do, or of what else is there."""
    return format == "dcp" and is_directory(path) and bool(directory_at(path).names())


def _same(source: str, path: str) -> bool:
    try:
        return stat_of(source).identity == stat_of(path).identity
    except OSError:
        return False
