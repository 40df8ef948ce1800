"""All formats but DCP's: files that one rank each writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import engine
from .._storage.directory import directory_at
from ..flatten import Path
from .optional_numpy import numpy_needed
from .plan import Output
from .safetensors_sink import SafetensorsLayout, shards, write_index
from .streamed_file import Layout
from .torch_sink import torch_layout


@dataclass(frozen=True)
class OutputFile:
    """A file to write."""

    name: str  #: in its folder; empty for a destination that is one file
    bytes: int  #: of its tensors
    layout: Callable[[], Layout]


@dataclass(frozen=True)
class Files:
    """All of them, and what is done in their folder when they are written."""

    files: list[OutputFile]
    finish: Callable[[str], None] | None = None  #: None for a destination that is one file


def safetensors_files(outputs: Sequence[Output], in_folder: bool, most_bytes: int) -> Files:
    if not in_folder:
        return _one(outputs, lambda: SafetensorsLayout(outputs))
    parts = shards(outputs, most_bytes)
    layouts = {name: SafetensorsLayout(part) for name, part in parts}  # now, to raise before anything is written
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
        from .numpy_dtypes import DTYPES_NAME
        from .numpy_sink import NpyLayout, dtypes_to_tell, file_name
    files = [
        OutputFile(file_name(output.name), output.bytes, lambda output=output: NpyLayout(output))  # type: ignore[misc]
        for output in outputs
    ]
    dtypes = dtypes_to_tell(outputs)

    def finish(directory: str) -> None:
        if dtypes:
            with engine.named_errors(str, directory, len(dtypes)):
                directory_at(directory).write(DTYPES_NAME, dtypes)

    return Files(files, finish)


def _one(outputs: Sequence[Output], layout: Callable[[], Layout]) -> Files:
    return Files([OutputFile("", _bytes(outputs), layout)])


def _bytes(outputs: Sequence[Output]) -> int:
    return sum(output.bytes for output in outputs)


def shared_out(files: Sequence[OutputFile], ranks: int) -> list[int]:
    """For each file the rank that writes it: the largest first, to whoever has the least."""
    held = [0] * ranks
    of = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -files[number].bytes):
        rank = min(range(ranks), key=held.__getitem__)
        of[number] = rank
        held[rank] += files[number].bytes + 1
    return of
