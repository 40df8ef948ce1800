"""Recognizes the format of a checkpoint by names and first bytes, and when it was committed. Needs no torch."""

from __future__ import annotations

import os
from typing import Literal

from .._engine.engine_errors import named_system_errors, of_system
from .._storage.open_storage import is_file, storage_at
from .archive_entries import is_archive
from .native.file_names import METADATA_NAME, is_metadata_file
from .native.metadata_file import has_metadata
from .safetensors import model_names

Kind = Literal["dcp", "safetensors", "archive"]
Format = Literal["dcp", "safetensors", "torch"]  #: of a conversion
_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"
}  # fmt: skip


def recognize(path: str) -> Kind | None:
    """Returns the kind of checkpoint at `path`, by names in a folder and the first bytes of a file. "archive": of
    torch.save. None if there is no checkpoint.

    Raises `CheckpointError` if an object store or a file cannot be read.
    """
    if has_metadata(path, None):  # checked first: many ranks call this, and listing a folder may be slow
        return "dcp"
    try:
        names = storage_at(path).names()
    except (NotADirectoryError, FileNotFoundError):
        if not is_file(path):
            return None
        with named_system_errors(path):
            return "archive" if is_archive(path) else "safetensors"
    except OSError as error:
        if storage_at(path).is_away(error):
            raise of_system(error, path) from error
        return None
    if any(map(is_metadata_file, names)):  # each rank has saved for itself
        return "dcp"
    if any(name.endswith(model_names.SUFFIXES) for name in names):
        return "safetensors"
    return None


def committed_at(path: str) -> int | None:
    """Returns when the checkpoint or model in a folder was committed, in nanoseconds: the time of the file that a save
    writes last. None if there is none, as after a save that died. Raises as `Storage.has` and `Storage.stat`."""
    storage = storage_at(path)
    found = (name for name in (METADATA_NAME, model_names.SINGLE_NAME, model_names.INDEX_NAME) if storage.has(name))
    return next((storage.stat(name).modified_ns for name in found), None)


def format_of(path: str) -> Format | None:
    """The format that the name of a conversion's destination implies, or None."""
    return _SUFFIXES.get(os.path.splitext(path)[1])
