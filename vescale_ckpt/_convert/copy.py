"""Copies one folder of any format file by file, verified, for `vescale-ckpt copy` and the uploads of a manager.

What is read gets a CRC-32 on the way, and what was written is read back. A copy that was killed leaves what it has
made, and the next one does not send a file again that is there with the size and the checksum of the source's.

On a file system all files are made in a pending folder. There each record is compared with the checksums that the
checkpoint has, and each file that has bytes without checksums with the CRC-32 of what was read. Only then does the copy
get its name. An object store has no such folder: there files get their names at once, once the source was verified, and
those that make them a checkpoint are written last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from .. import settings
from .._checkpoint.check_records import Progress
from .._checkpoint.copied_files import CopiedFiles, holds_data, marks_checkpoint, tells_its_save
from .._checkpoint.damage import raise_damage
from .._checkpoint.native.commit_metadata import Replaced, remove_orphans
from .._checkpoint.native.file_names import is_data_file, is_metadata_file, metadata_name
from .._checkpoint.open_checkpoint import open_checkpoint
from .._checkpoint.verify import verify_checkpoint
from .._engine import _C
from .._engine.engine_errors import named_system_errors
from .._storage.open_storage import (
    checkpoint_path,
    is_file,
    is_folder,
    size_in,
    stat_of,
    storage_at,
)
from .._storage.pending import PendingFolder
from ..errors import CheckpointError, CorruptCheckpointError
from ..settings import checked_flag, checked_path
from . import formats
from .transfer import CopyReport, Made, Transfer


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Copies the checkpoint `src` to `dst`, atomically and durably. Runs in this process alone.

    Copies the files of the checkpoint and other files beside them, such as a model's configuration, but no subfolders
    and files left by dead saves. If it raises, `dst` is unchanged.

    Args:
        src: a checkpoint's directory.
        dst: where to copy it.
        overwrite: whether an existing `dst` may be replaced.
        progress: called with the bytes copied or verified so far, and in total.

    Raises:
        CheckpointError: there is no checkpoint, `dst` exists, or the source changed during the copy.
        CorruptCheckpointError, UntrustedCheckpointError: the source is damaged or unsafe.
        StorageFullError: there is not enough space.
    """
    checked_flag("overwrite", overwrite)
    settings.check()
    began = time.perf_counter()
    source, path = checkpoint_path(checked_path("src", src)), checkpoint_path(checked_path("dst", dst))
    path = path.rstrip("/") or path
    report = CopyReport(path)
    with named_system_errors(path):
        if not is_folder(source):
            with closing(open_checkpoint(source)):
                raise CheckpointError(f"{source} is one file: copy it with cp, and verify the copy", path=source)
        with storage_at(source).share(metadata_name(None)):
            FolderCopy(source, path, overwrite, report, progress).run()
    report.seconds = time.perf_counter() - began
    return report


class FolderCopy:
    """A copy of the checkpoint in a folder.

    Args:
        bytes_per_second: most that it writes; 0: no limit.
        read_back: whether files are read again and compared, before the copy counts. Without it, a data file that is
            there with the right length counts as complete: uploads go on with that.
        check: called between pieces, in the thread that copies. If it raises, what was copied stays for the next copy.
    """

    def __init__(
        self,
        source: str,
        path: str,
        overwrite: bool,
        report: CopyReport,
        progress: Progress | None = None,
        *,
        bytes_per_second: int = 0,
        read_back: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._path = path
        self._overwrite = overwrite
        self._report = report
        self._progress = progress
        self._bytes_per_second = bytes_per_second
        self._read_back = read_back
        self._check = check

    def run(self) -> None:
        """Raises OSError, too."""
        files = CopiedFiles(self._source)
        self._report.left_out = files.left_out
        sizes = {name: stat_of(path).size for name, path in files.paths.items()}
        renames = storage_at(self._path).renames
        reads = 1 + self._read_back + (self._read_back and not renames)
        transfer = Transfer(reads * sum(sizes.values()), self._progress, self._bytes_per_second, self._check)
        if renames:
            made = self._through_pending_folder(files, sizes, transfer)
        else:
            made = self._in_place(files, sizes, transfer)
        self._report.files, self._report.bytes = len(made), sum(file.length for file in made)

    def _through_pending_folder(self, files: CopiedFiles, sizes: dict[str, int], transfer: Transfer) -> list[Made]:
        self._check_destination(files)
        with PendingFolder(self._path, resumes=True) as folder:
            try:
                folder.make()
                storage = storage_at(folder.temporary)
                for name in storage.names():  # that a copy that died took of an earlier state of the source
                    if name not in files.paths and is_file(os.path.join(folder.temporary, name)):
                        storage.remove(name)
                there = {name: size_in(folder.temporary, name) for name in files.paths}
                folder.storage.check_space(sum(size for name, size in sizes.items() if there[name] != size))
                made = [self._copy(name, files, folder.temporary, transfer) for name in files.paths]
                for name, content in files.last().items():
                    storage.write(name, content)
                    made.append(Made(name, len(content), _C.crc32(content)))
                _compare(self._source, folder.temporary, made, transfer, self._report)
                for inside in {os.path.dirname(name) for name in files.paths} - {""}:
                    storage_at(os.path.join(folder.temporary, inside)).sync()
                self._check_destination(files)
                folder.commit()
            except KeyboardInterrupt:
                folder.committed()  # the next copy goes on with it
                raise
        return made

    def _in_place(self, files: CopiedFiles, sizes: dict[str, int], transfer: Transfer) -> list[Made]:
        storage = storage_at(self._path)
        if not self._overwrite:
            storage.check_exclusive_commits()
        superseded = self._superseded(files)
        later = [] if superseded is None else [name for name in files.paths if self._comes_later(name, files)]
        if self._read_back:
            found = verify_checkpoint(self._source, False, _progress_of(transfer), must_exist=True)
            raise_damage(found)
            self._report.unverified_bytes = found.unverified_bytes
        made = [self._copy_and_compare(name, files, transfer) for name in files.paths if name not in later]
        for name, content in files.last().items():
            storage.commit(name, content, self._overwrite)
            made.append(Made(name, len(content), _C.crc32(content)))
        if superseded:
            remove_orphans(self._path, superseded)
        return made + [self._copy_and_compare(name, files, transfer) for name in later]

    def _comes_later(self, name: str, files: CopiedFiles) -> bool:
        """Whether a file replaces one that lies beside the old checkpoint, as a model's configuration: until the commit
        it belongs to the old one. An upload, which reads nothing back, is repeated only until the commit."""
        lies_beside = name not in files.of_checkpoint and not tells_its_save(name)
        return self._read_back and lies_beside and storage_at(self._path).has(name)

    def _copy_and_compare(self, name: str, files: CopiedFiles, transfer: Transfer) -> Made:
        made = self._copy(name, files, self._path, transfer)
        if self._read_back:
            _read_back(os.path.join(self._path, name), made, transfer)
        return made

    def _copy(self, name: str, files: CopiedFiles, folder: str, transfer: Transfer) -> Made:
        """Makes one file, unless it is there."""
        self._check()
        source, path, storage = files.paths[name], os.path.join(folder, name), storage_at(folder)
        size, there = stat_of(source).size, size_in(folder, name)
        if there == size:
            if not self._read_back and is_data_file(name):  # no two saves give a file the same name
                transfer.moved(size)
                return self._resumed(Made(name, size, None))
            made = Made(name, size, transfer.crc_of(source, size))
            if transfer.crc_of(path, size) == made.crc:
                storage.sync(name)  # its writer may have died before
                return self._resumed(made)
        if there is not None and folder != self._path:  # nobody reads what is pending
            storage.remove(name)
        storage_at(os.path.dirname(path)).make()
        return transfer.copy(source, name, folder, lambda make: make(path))

    def _resumed(self, made: Made) -> Made:
        self._report.resumed_files += 1
        self._report.resumed_bytes += made.length
        return made

    # --- What is there

    def _superseded(self, files: CopiedFiles) -> set[str] | None:
        """The data files of the checkpoint that is in the place, and that this one replaces. None if there is no
        checkpoint. Raises `CheckpointError` if the copy must not be made."""
        try:
            there = set(storage_at(self._path).names())
        except FileNotFoundError:
            return None
        marks = set(filter(marks_checkpoint, there))
        if not marks and any(map(marks_checkpoint, files.names)):
            return None
        if not self._overwrite:
            raise formats.exists(self._path)
        # While they are written, the old checkpoint would be a mixture. No two saves give a file the same random name.
        kept = {name for name in there & files.of_checkpoint if not is_data_file(name)}
        if not any(map(is_metadata_file, files.names)):  # a model: readers may find what is there in its place
            kept |= marks
        if kept:
            raise CheckpointError(
                f"{self._path} holds {min(kept)} already, and is not replaced: remove it first", path=self._path
            )
        return set(Replaced.read(self._path).files - files.of_checkpoint)

    def _check_destination(self, files: CopiedFiles) -> None:
        """Raises `CheckpointError` unless the copy may take its name. With `overwrite` it replaces a checkpoint, but
        not a folder with anything else in it."""
        if formats.names_to_replace(self._source, self._path, True, self._overwrite):
            formats.check_foreign(self._path, files.foreign_in(self._path))


# --- What was written


def _compare(
    source: str,
    made: str,
    files: Sequence[Made],
    transfer: Transfer,
    report: CopyReport,
) -> None:
    """Reads back what was written to the folder `made`. Raises `CorruptCheckpointError` if it is damaged, with the
    place in the source if that is damaged too."""
    found = verify_checkpoint(made, False, _progress_of(transfer), must_exist=True)
    if found.unreadable or found.refused:
        first = (found.unreadable or found.refused)[0]
        raise CheckpointError(f"the copy of {source} cannot be read back: {first.reason}", path=first.file)
    if found.damaged:
        raise_damage(verify_checkpoint(source, False, must_exist=True))
        first = found.damaged[0]
        raise CorruptCheckpointError(
            f"the copy differs from {source}, which is sound: {first.reason}", key=first.key, file=source
        )
    report.unverified_bytes = found.unverified_bytes
    covered = found.files and not (found.unverified_bytes or found.harmless)  # all data, by the checkpoint's checksums
    for file in files:
        if not (covered and holds_data(file.name)):
            _read_back(os.path.join(made, file.name), file, transfer)


def _progress_of(transfer: Transfer) -> Progress:
    """Tells a transfer's progress what a verification that begins now has read."""
    begun = transfer.done
    return lambda done, total: transfer.moved(begun + done - transfer.done)


def _read_back(path: str, made: Made, transfer: Transfer) -> None:
    if transfer.crc_of(path, made.length) != made.crc:
        raise CorruptCheckpointError(f"{path} cannot be read back as it was written", key=None, file=path)
