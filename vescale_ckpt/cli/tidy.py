"""Runs the commands that remove checkpoints and leftovers: `prune` and `repair`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

from .. import api
from .._checkpoint.native import metadata_file
from .._checkpoint.native.commit_metadata import remove_leftovers
from .._checkpoint.native.extra_copies import write_missing
from .._checkpoint.native.file_names import MARK_NAME, is_metadata_file, is_of_a_save
from .._checkpoint.native.step_order import SavedOrder, all_steps, path_of
from .._checkpoint.safetensors.folder import left_by_exports
from .._convert.formats import format_of, is_part_of_export
from .._inspect.info import inspect
from .._storage import orphans
from .._storage.open_storage import checkpoint_path, is_file, is_folder, storage_at
from .._storage.orphans import Orphan
from .._storage.pending import final_name, is_begun_copy
from ..errors import CheckpointError
from ..manager import step_directories
from ..manager.clean_up import to_remove
from ..manager.retention import Retention
from . import output
from .output import FINE


def prune(options: Namespace) -> int:
    """Removes what the rule does not keep. Raises ValueError for a rule that keeps all or contradicts itself."""
    root = checkpoint_path(options.directory)
    if options.keep is None:
        raise ValueError("--keep is wanted: how many checkpoints stay")
    retention = Retention(options.keep, options.keep_period, options.best, options.best_mode)
    last = SavedOrder(root).last
    if last is None:
        raise CheckpointError(f"{root} holds no checkpoints of a CheckpointManager", path=root)
    steps = sorted(to_remove(root, retention, last))
    removed = steps
    if not options.dry_run:
        removed = sorted(step_directories.remove(root, steps))
        step_directories.remove_unneeded(root)
    kept = [step for step in SavedOrder(root).newest_first()[::-1] if step not in removed]
    if options.json:
        output.print_json("prune/1", {"removed": removed, "kept": kept, "dry_run": options.dry_run})
        return FINE
    verb = "would remove" if options.dry_run else "removed"
    for step in removed:
        print(f"{verb} {path_of(root, step)}")
    for step in sorted(set(steps) - set(removed)):
        print(f"kept {path_of(root, step)}: it is in use")
    print(f"{verb} {len(removed):,}, {len(kept):,} stay")
    return FINE


def repair(options: Namespace) -> int:
    """Removes leftovers below a manager's directory, or in a checkpoint's, and of exports, conversions and copies.
    Writes copies of extra files that are missing."""
    root = checkpoint_path(options.directory)
    if not is_folder(root):
        raise FileNotFoundError(f"{root} is no directory")
    dry_run = options.dry_run
    removed = [path_of(root, step) for step in step_directories.remove_leftovers(root, dry_run=dry_run)]
    for directory in (root, *(path_of(root, step) for step in all_steps(root))):
        if directory not in removed:
            removed += [os.path.join(directory, name) for name in remove_leftovers(directory, dry_run=dry_run)]
    removed += orphans.remove([*left_by_exports(root), *_left_by_conversions(root)], dry_run=dry_run)
    uploads = storage_at(root).abort_uploads(orphans.SAVE_GRACE, dry_run=dry_run)
    written = []
    for directory in (root, *(path_of(root, step) for step in all_steps(root))):
        if directory not in removed:
            written += [os.path.join(directory, name) for name in _written_copies(directory, dry_run)]
    if options.json:
        output.print_json("repair/1", {"removed": removed, "written": written, "uploads": uploads, "dry_run": dry_run})
        return FINE
    verb = "would remove" if dry_run else "removed"
    for path in uploads or ():
        print(f"{'would abort' if dry_run else 'aborted'} the upload of {path}, which did not finish")
    if uploads is None:
        print(
            "uploads that did not finish are not looked for: that needs boto3 and an s3:// bucket of the environment's"
        )
    for path in removed:
        print(f"{verb} {path}")
    for path in written:
        print(f"{'would write' if dry_run else 'wrote'} {path}, an extra file of the checkpoint")
    print(f"{verb} {len(removed):,} leftovers" if removed or uploads else "nothing is left over")
    return FINE


def _written_copies(directory: str, dry_run: bool) -> list[str]:
    """Writes the copies of extra files that are missing beside a checkpoint."""
    files: dict[str, bytes] = {}
    try:
        if metadata_file.has_metadata(directory, None) and inspect(directory).extra_files:
            api.load(directory, {}, extra_files=files)
    except CheckpointError:  # damaged: `verify` says how
        return []
    return write_missing(directory, files, dry_run=dry_run)


def _left_by_conversions(root: str) -> Iterator[Orphan]:
    """Files and folders with temporary names that hold nothing but a part of a checkpoint. While they are written,
    their writers keep them locked."""
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
    return is_of_a_save(name) or name == MARK_NAME or is_metadata_file(name) or is_part_of_export(name)
