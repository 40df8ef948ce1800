"""Removes the orphans of dead saves, exports, conversions and copies, and writes lost copies of extra files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from .._checkpoint.native import metadata_file
from .._checkpoint.native.commit_metadata import named_by_any, remove_orphans
from .._checkpoint.native.extra_copies import write_missing
from .._checkpoint.native.file_names import is_metadata_file, is_of_a_save
from .._checkpoint.native.step_order import all_steps, path_of
from .._checkpoint.open_checkpoint import open_checkpoint
from .._checkpoint.recognize import format_of
from .._checkpoint.safetensors.export_folder import left_by_exports
from .._convert.formats import is_part_of_export
from .._engine import _C
from .._state.extra_files import contents_in, is_extra
from .._storage import orphans
from .._storage.open_storage import is_file, is_folder, storage_at
from .._storage.orphans import Orphan
from .._storage.pending import final_name, is_begun_copy
from ..errors import CheckpointError
from . import step_directories


@dataclass(frozen=True)
class RepairReport:
    """The paths that a repair changed or, with `dry_run`, would change."""

    removed: list[str]
    written: list[str]


def repair(root: str, *, dry_run: bool) -> RepairReport:
    """Repairs a manager's directory, or a checkpoint's. With `dry_run` it changes nothing and only reports.

    If metadata below the directory cannot be read, or names files of another folder, folders without metadata stay:
    they may have these files."""
    directories = [root, *(path_of(root, step) for step in all_steps(root))]
    removed: list[str] = []
    if all(map(_names_own_files, directories)):
        removed += [path_of(root, step) for step in step_directories.remove_orphans(root, dry_run=dry_run)]
    else:
        directories = [path for path in directories if metadata_file.has_metadata(path, None)]
    for directory in directories:
        if directory not in removed:
            removed += [os.path.join(directory, name) for name in remove_orphans(directory, dry_run=dry_run)]
    removed += orphans.remove([*left_by_exports(root), *_left_by_conversions(root)], dry_run=dry_run)
    written = []
    for directory in directories:
        if directory not in removed and metadata_file.has_metadata(directory, None):
            with suppress(CheckpointError):  # `verify` says how a checkpoint is damaged
                written += [os.path.join(directory, name) for name in write_lost_copies(directory, dry_run=dry_run)]
    return RepairReport(removed, written)


def _names_own_files(directory: str) -> bool:
    try:
        named_by_any(directory)
    except (CheckpointError, OSError, _C.EngineError):
        return False
    return True


def write_lost_copies(directory: str, *, dry_run: bool = False) -> list[str]:
    """Writes the copies of extra files that are missing beside a checkpoint, and returns their names. Raises
    `CheckpointError` for a damaged checkpoint."""
    with closing(open_checkpoint(directory)) as checkpoint:
        files = contents_in(checkpoint.load_objects(list(filter(is_extra, checkpoint.objects))))
    return write_missing(directory, files, dry_run=dry_run)


def _left_by_conversions(root: str) -> Iterator[Orphan]:
    """The files and folders with temporary names that hold only parts of a checkpoint. A live writer keeps them
    locked."""
    for name in sorted(storage_at(root).names()):
        path, final = os.path.join(root, name), final_name(name)
        if final is None:
            continue
        if is_folder(path):
            if is_begun_copy(name) or all(map(_is_of_checkpoint, storage_at(path).names())):
                yield Orphan([path], path, orphans.NEVER, are_folders=True)
        elif is_file(path) and format_of(final) is not None:
            yield Orphan([path], path, orphans.SMALL_FILE_GRACE)


def _is_of_checkpoint(name: str) -> bool:
    name = final_name(name) or name
    return is_of_a_save(name) or is_metadata_file(name) or is_part_of_export(name)
