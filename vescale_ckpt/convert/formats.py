"""Chooses the source and the sink for a conversion from formats, and checks what the result may replace."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from .._engine.errors import named_errors
from .._native.metadata_file import has_metadata
from .._state.structure import Path
from .._storage.directory import directory_at, stat_of
from .._storage.directory import is_folder as is_directory
from .._storage.file_kinds import kind_of_file
from ..errors import CheckpointError
from .archive import entries
from .dcp_source import DcpSource
from .plan import Output
from .safetensors_sink import SafetensorsLayout, shards, write_index
from .safetensors_source import SafetensorsSource
from .source import Source
from .streamed_file import Layout
from .torch_sink import torch_layout
from .torch_source import TorchSource

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


def is_folder(path: str, format: Format) -> bool:
    """Whether a destination is a folder rather than a file."""
    return format in ("dcp", "npy") or (format == "safetensors" and not path.endswith(".safetensors"))


def check_destination(source: str, path: str, format: Format, overwrite: bool) -> None:
    """Raises `CheckpointError` if the destination must not be replaced. With `overwrite` a file may be replaced by a
    file, a DCP checkpoint by another, and a folder by one of the same format if it holds no other files."""
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
    """Whether the new checkpoint is committed into the existing directory, as a save does."""
    return format == "dcp" and is_directory(path) and bool(directory_at(path).names())


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
        names = directory_at(path).names()
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return SafetensorsSource(path)
        if any(name.endswith(".npy") for name in names):
            return _numpy_source(path)
        raise CheckpointError(
            f"{path} has no .metadata, no .safetensors and no .npy files: not a checkpoint, or one whose save did not "
            "finish",
            path=path,
        )
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
    if any(entry.name.endswith("/data.pkl") for entry in entries(path)):
        return TorchSource(path)
    return _numpy_source(path)


def _numpy_source(path: str) -> Source:
    with numpy_needed():
        from .numpy_source import NumpySource
    return NumpySource(path)


@contextmanager
def numpy_needed() -> Iterator[None]:
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


@dataclass(frozen=True)
class OutputFile:
    """A file to write."""

    name: str  #: in its folder; empty if the destination is one file
    bytes: int  #: of its tensors
    layout: Callable[[], Layout]


@dataclass(frozen=True)
class Files:
    """All files of a conversion, and a last step in their folder after they are written."""

    files: list[OutputFile]
    finish: Callable[[str], None] | None = None  #: called with the folder; None if the destination is one file


def safetensors_files(outputs: Sequence[Output], in_folder: bool, most_bytes: int) -> Files:
    if not in_folder:
        return _one(outputs, lambda: SafetensorsLayout(outputs))
    parts = shards(outputs, most_bytes)
    layouts = {name: SafetensorsLayout(part) for name, part in parts}  # made now: raises before writing
    files = [OutputFile(name, _bytes(part), lambda name=name: layouts[name]) for name, part in parts]  # type: ignore[misc]
    return Files(files, lambda directory: write_index(directory, parts) if len(parts) > 1 else None)


def torch_file(
    outputs: Sequence[Output], values: Mapping[str, Any], paths: Mapping[str, Path], structure: str | None
) -> Files:
    return _one(outputs, lambda: torch_layout(outputs, values, paths, structure))


def npz_file(outputs: Sequence[Output]) -> Files:
    with numpy_needed():
        from .numpy_sink import npz_layout
    return _one(outputs, lambda: npz_layout(outputs))


def npy_files(outputs: Sequence[Output]) -> Files:
    with numpy_needed():
        from .numpy_sink import NpyLayout, dtypes_to_tell, file_name
        from .numpy_source import DTYPES_NAME
    files = [
        OutputFile(file_name(output.name), output.bytes, lambda output=output: NpyLayout(output))  # type: ignore[misc]
        for output in outputs
    ]
    dtypes = dtypes_to_tell(outputs)

    def finish(directory: str) -> None:
        if dtypes:
            with named_errors(str, directory, len(dtypes)):
                directory_at(directory).write(DTYPES_NAME, dtypes)

    return Files(files, finish)


def _one(outputs: Sequence[Output], layout: Callable[[], Layout]) -> Files:
    return Files([OutputFile("", _bytes(outputs), layout)])


def _bytes(outputs: Sequence[Output]) -> int:
    return sum(output.bytes for output in outputs)


def rank_of_each(files: Sequence[OutputFile], ranks: int) -> list[int]:
    """The rank that writes each file. The largest files are assigned first, each to the rank with the fewest bytes."""
    held = [0] * ranks
    of = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -files[number].bytes):
        rank = min(range(ranks), key=held.__getitem__)
        of[number] = rank
        held[rank] += files[number].bytes + 1
    return of
