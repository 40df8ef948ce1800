"""Chooses the files of a conversion by their format, and checks what the result may replace."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._checkpoint.recognize import Format
from .._storage.open_storage import is_folder as is_directory
from .._storage.open_storage import stat_of, storage_at
from ..errors import CheckpointError
from .output_files import Files, OutputFile, torch_file
from .plan import Plan
from .safetensors_files import safetensors_files

_OF_SAFETENSORS = re.compile(r".*\.safetensors|.*\.safetensors\.index\.json")


def is_part_of_export(name: str) -> bool:
    """Whether a folder of safetensors has files of that name."""
    return _OF_SAFETENSORS.fullmatch(name) is not None


def is_folder(path: str, format: Format) -> bool:
    """Whether a destination is a folder rather than a file."""
    return format == "dcp" or (format == "safetensors" and not path.endswith(".safetensors"))


def check_destination(source: str, path: str, format: Format, overwrite: bool) -> None:
    """Raises `CheckpointError` if the destination must not be replaced. With `overwrite` a file may be replaced by a
    file, a DCP checkpoint by another, and a folder by one of the same format if it holds no other files."""
    if not storage_at(path).renames:
        raise CheckpointError(
            f"{path} is in an object store: convert to a disk, and copy that there (vescale-ckpt copy)", path=path
        )
    names = names_to_replace(source, path, is_folder(path, format), overwrite)
    if format == "safetensors" and is_folder(path, format):
        check_foreign(path, sorted(name for name in names if not is_part_of_export(name)))


def names_to_replace(source: str, path: str, by_folder: bool, overwrite: bool) -> list[str]:
    """Returns the names in the destination of a conversion or a copy; none if it does not exist, [""] for a file.
    Raises `CheckpointError` if it is the source, is a file and not a folder or the reverse, or may not be replaced."""
    if not os.path.lexists(path.rstrip("/") or path):
        return []
    if _same(source, path):
        raise CheckpointError(f"{path} would be written onto itself", path=path)
    is_there = is_directory(path)
    if is_there != by_folder:
        kinds = ("a file", "a folder") if by_folder else ("a folder", "a file")
        raise CheckpointError(f"{path} is {kinds[0]}, where {kinds[1]} would be written", path=path)
    names = storage_at(path).names() if is_there else [""]
    if names and not overwrite:
        raise exists(path)
    return names


def check_foreign(path: str, names: Sequence[str]) -> None:
    """Raises `CheckpointError` if the destination holds such names, which are of nothing that is replaced."""
    if names:
        raise CheckpointError(f"{path} holds {names[0]}, too, and is not replaced: remove it first", path=path)


def exists(path: str) -> CheckpointError:
    return CheckpointError(f"{path} exists: it is only replaced with overwrite=True (--overwrite)", path=path)


def goes_into_place(path: str, format: Format) -> bool:
    """Whether files are written where they stay: into an existing directory of DCP's, as a save does."""
    return format == "dcp" and is_directory(path) and bool(storage_at(path).names())


def _same(source: str, path: str) -> bool:
    try:
        return stat_of(source).identity[:2] == stat_of(path).identity[:2]
    except OSError:
        return False


def files_of(plan: Plan, objects: Mapping[str, Any], path: str, format: Format, most_bytes: int) -> Files | None:
    """The files to write. None for DCP, of which each rank writes one."""
    if format == "dcp":
        return None
    if format == "safetensors":
        return safetensors_files(plan.outputs, plan.ties, is_folder(path, format), most_bytes)
    return torch_file(plan, objects)


def rank_of_each(files: Sequence[OutputFile], ranks: int) -> list[int]:
    """The rank that writes each file. The largest files are assigned first, each to the rank with the fewest bytes."""
    held = [0] * ranks
    of = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -files[number].bytes):
        rank = min(range(ranks), key=held.__getitem__)
        of[number] = rank
        held[rank] += files[number].bytes + 1
    return of
