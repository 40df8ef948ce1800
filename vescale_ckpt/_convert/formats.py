"""Chooses the source and the files of a conversion by their formats, and checks what the result may replace."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from .._checkpoint.native.metadata_file import NO_CHECKPOINT, has_metadata
from .._checkpoint.safetensors.model_names import holds_export
from .._read.no_checkpoint import explained
from .._storage.file_kinds import kind_of_file
from .._storage.open_storage import is_folder as is_directory
from .._storage.open_storage import stat_of, storage_at
from ..errors import CheckpointError
from .archive import open_archive
from .dcp_files import DcpSource
from .plan import Plan
from .safetensors_files import SafetensorsSource, safetensors_files
from .source import Source
from .streamed_file import Files, OutputFile
from .torch_files import TorchSource, torch_file

Format = Literal["dcp", "safetensors", "torch", "npz", "npy"]
_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors", ".npz": "npz", ".pt": "torch", ".pth": "torch", ".bin": "torch"
}  # fmt: skip
_OF_FORMAT = {
    "safetensors": re.compile(r".*\.safetensors|.*\.safetensors\.index\.json"),
    "npy": re.compile(r".*\.npy|torch_dtypes\.json"),
}


def format_of(path: str) -> Format | None:
    """The format that the name of a destination implies, or None."""
    return _SUFFIXES.get(os.path.splitext(path)[1])


def is_part_of_export(name: str) -> bool:
    """Whether a folder of a format other than DCP has files of that name."""
    return any(pattern.fullmatch(name) for pattern in _OF_FORMAT.values())


def is_folder(path: str, format: Format) -> bool:
    """Whether a destination is a folder rather than a file."""
    return format in ("dcp", "npy") or (format == "safetensors" and not path.endswith(".safetensors"))


def check_destination(source: str, path: str, format: Format, overwrite: bool) -> None:
    """Raises `CheckpointError` if the destination must not be replaced. With `overwrite` a file may be replaced by a
    file, a DCP checkpoint by another, and a folder by one of the same format if it holds no other files. In an object
    store, a folder of safetensors files is not replaced."""
    where = storage_at(path)
    if format == "npy":
        where.check_mounted(
            "a folder of .npy files, which no file makes complete,", "Convert to one file: format='npz'"
        )
    if not _is_there(path):
        return
    is_there = is_directory(path)
    if _same(source, path):
        raise CheckpointError(f"{path} would be converted onto itself", path=path)
    if is_there != is_folder(path, format):
        kinds = ("a file", "a folder") if is_folder(path, format) else ("a folder", "a file")
        raise CheckpointError(f"{path} is {kinds[0]}, where {kinds[1]} would be written", path=path)
    names = storage_at(path).names() if is_there else [""]
    if names and not overwrite:
        raise CheckpointError(f"{path} exists: it is only replaced with overwrite=True", path=path)
    if is_there and not where.renames and format == "safetensors" and holds_export(path):
        raise CheckpointError(
            f"{path} holds a model, which cannot be replaced in one step in an object store: convert to another folder",
            path=path,
        )
    pattern = _OF_FORMAT.get(format) if is_there else None
    others = sorted(name for name in names if pattern is not None and not pattern.fullmatch(name))
    if others:
        raise CheckpointError(f"{path} holds {others[0]}, too, and is not replaced: remove it first", path=path)


def goes_into_place(path: str, format: Format) -> bool:
    """Whether files are written where they stay: into an existing directory of DCP's, as a save does, and in object
    stores, where the last file makes the others a checkpoint."""
    return not storage_at(path).renames or (format == "dcp" and is_directory(path) and bool(storage_at(path).names()))


def _is_there(path: str) -> bool:
    directory, name = os.path.split(path.rstrip("/") or path)
    return storage_at(directory).has(name) or is_directory(path)


def _same(source: str, path: str) -> bool:
    try:
        return stat_of(source).identity == stat_of(path).identity
    except OSError:
        return False


# --- What is read


def open_source(path: str) -> Source:
    """Opens a checkpoint of any known format. The format is recognised from the files.

    Raises `CheckpointError` if there is no checkpoint of a known format, and the errors of the format's source.
    """
    if is_directory(path):
        if has_metadata(path, None):
            return DcpSource(path)
        names = storage_at(path).names()
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return SafetensorsSource(path)
        if any(name.endswith(".npy") for name in names):
            return _numpy_source(path)
        with explained(path):
            text = f"{path} has no .metadata, no .safetensors and no .npy files: {NO_CHECKPOINT}"
            raise CheckpointError(text, path=path, errno=errno.ENOENT)
    try:
        kind = kind_of_file(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error
    if kind == "pickle":
        raise CheckpointError(
            f"{path} seems to be a file of torch.save before torch 1.6: load it and save it again", path=path
        )
    if kind == "other":
        return SafetensorsSource(path)
    storage_at(path).check_mounted("a file of torch.save or numpy that is read", "Copy it to a disk first")
    with open_archive(path) as archive:
        is_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
    if is_torch:
        return TorchSource(path)
    return _numpy_source(path)


def _numpy_source(path: str) -> Source:
    with _numpy_needed():
        from .numpy_files import NumpySource
    return NumpySource(path)


@contextmanager
def _numpy_needed() -> Iterator[None]:
    """A context for importing a module that needs numpy. Raises `CheckpointError` if numpy is not installed. Only
    numpy's own formats need it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise CheckpointError(
            "the formats .npz and .npy need numpy, which is not installed: pip install numpy"
        ) from None


# --- What is written


def files_of(plan: Plan, objects: Mapping[str, Any], path: str, format: Format, most_bytes: int) -> Files | None:
    """The files to write. None for DCP, of which each rank writes one."""
    if format == "dcp":
        return None
    if format == "safetensors":
        return safetensors_files(plan.outputs, is_folder(path, format), most_bytes)
    if format == "torch":
        return torch_file(plan.outputs, objects, plan.paths, plan.structure)
    with _numpy_needed():
        from .numpy_files import npy_files, npz_file
    return npz_file(plan.outputs) if format == "npz" else npy_files(plan.outputs)


def rank_of_each(files: Sequence[OutputFile], ranks: int) -> list[int]:
    """The rank that writes each file. The largest files are assigned first, each to the rank with the fewest bytes."""
    held = [0] * ranks
    of = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -files[number].bytes):
        rank = min(range(ranks), key=held.__getitem__)
        of[number] = rank
        held[rank] += files[number].bytes + 1
    return of
