"""Copies one checkpoint of any format file by file, verified, for `vescale-ckpt copy`.

What is read gets a CRC-32 on the way. What was written is then read back: each record is compared with the checksums
that the checkpoint has, and each file that has bytes without checksums with the CRC-32 of what was read. Only then does
the copy get its name. A copy that was killed leaves its folder, and the next one copies only the files that are missing
there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from .. import settings
from .._checkpoint.check_records import Progress
from .._checkpoint.native.file_names import (
    DELTA_NAME,
    INDEX_NAME,
    METADATA_NAME,
    is_metadata_file,
    metadata_name,
)
from .._checkpoint.native.named_files import check_replaceable
from .._checkpoint.open_checkpoint import open_checkpoint
from .._checkpoint.safetensors.headers import SUFFIX
from .._checkpoint.verify import verify_checkpoint
from .._engine import _C
from .._engine.errors import check_space, named_system_errors
from .._engine.torch_private import DEFAULT_SUFFIX
from .._storage.open_storage import checkpoint_path, is_file, is_folder, stat_of, storage_at
from .._storage.paths import data_path
from .._storage.pending import PendingFile
from .._storage.resumable import JOURNAL_NAME, ResumableFolder
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import VerifyReport
from ..settings import checked_flag, checked_path
from .copied_files import (
    SelfContained,
    exists,
    files_of_checkpoint,
    metadata_files,
    name_in_copy,
    names_to_copy,
)
from .store_copy import StoreCopy
from .transfer import CopyReport, Transfer


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Copies the checkpoint `src` to `dst`, which appears whole or not at all, and durably.

    Of a folder it copies the files of the checkpoint, and other files beside them, as a model's configuration. Folders
    and what dead saves have left stay behind. The copy of a delta save names no files of other checkpoints: it has
    copies of them, and metadata of its own, without an index. `progress` is called with the bytes copied or checked so
    far, and in all.

    Raises `CheckpointError` if there is no checkpoint, `dst` exists, or the source changes meanwhile;
    `CorruptCheckpointError` and `UntrustedCheckpointError` for a damaged source; `StorageFullError`. `dst` is then
    unchanged.
    """
    checked_flag("overwrite", overwrite)
    settings.check()
    began = time.perf_counter()
    source, path = checkpoint_path(checked_path("src", src)), checkpoint_path(checked_path("dst", dst))
    path = path.rstrip("/") or path
    report = CopyReport(path)
    with ExitStack() as held, named_system_errors(path):
        if is_folder(source):
            lock = storage_at(source).share(metadata_name(None))
            if lock is not None:
                held.callback(lock.release)
            kind = _FolderCopy if storage_at(path).renames else StoreCopy
            kind(source, path, overwrite, report, progress).run()
        else:
            _copy_file(source, path, overwrite, report, progress)
    report.seconds = time.perf_counter() - began
    return report


def _copy_file(source: str, path: str, overwrite: bool, report: CopyReport, progress: Progress | None) -> None:
    with closing(open_checkpoint(source)):
        pass  # it is a checkpoint
    _check_file_destination(source, path, overwrite)
    transfer = Transfer(2 * stat_of(source).size, progress)
    storage_at(os.path.dirname(path)).make()
    with PendingFile(path) as pending:
        length, crc = transfer.copy(source, pending.directory, pending.create)
        _compare(source, pending.paths[0], [("", length, crc)], transfer, report)
        _check_file_destination(source, path, overwrite)
        pending.commit()
    report.files, report.bytes = 1, length


def _check_file_destination(source: str, path: str, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    _check_not_same(source, path)
    if not is_file(path):
        raise CheckpointError(f"{path} is no file, where one would be written", path=path)
    if not overwrite:
        raise exists(path)


class _FolderCopy:
    def __init__(self, source: str, path: str, overwrite: bool, report: CopyReport, progress: Progress | None) -> None:
        self._source = source
        self._path = path
        self._overwrite = overwrite
        self._report = report
        self._progress = progress
        self._metadata = metadata_files(source)  # before they are read
        of_checkpoint = files_of_checkpoint(source)
        self._names, report.left_out = names_to_copy(source, of_checkpoint)
        self._made = SelfContained.of(source, of_checkpoint)  # in place of files of the source
        if self._made is not None:
            self._names = [name for name in self._names if name not in (INDEX_NAME, DELTA_NAME)]

    def run(self) -> None:
        report = self._report
        self._check_destination()
        sizes = {name: stat_of(data_path(self._source, name)).size for name in self._names}
        transfer = Transfer(2 * sum(sizes.values()), self._progress)
        folder = ResumableFolder(self._path)
        try:
            folder.make()
            known = _complete_files(folder, transfer)
            check_space(folder.directory, sum(size for name, size in sizes.items() if name_in_copy(name) not in known))
            done = [self._copy(name, folder, known, transfer) for name in self._names]
            if metadata_files(self._source) != self._metadata:
                raise CheckpointError(f"{self._source} was saved to while it was copied", path=self._source)
            if self._made is not None:
                done = [self._made.written(folder.temporary) if entry[0] == METADATA_NAME else entry for entry in done]
            self._remove_others(folder.temporary)
            _compare(self._source, folder.temporary, done, transfer, report)
            for name in {os.path.dirname(name_in_copy(name)) for name in self._names} - {""}:
                storage_at(os.path.join(folder.temporary, name)).sync()
            self._check_destination()
            folder.commit()
        except KeyboardInterrupt:
            folder.leave()
            raise
        finally:
            folder.discard()
        report.files, report.bytes = len(done), sum(length for _, length, _ in done)

    def _copy(
        self, name: str, folder: ResumableFolder, known: dict[str, _Complete], transfer: Transfer
    ) -> tuple[str, int, int]:
        """Returns the name in the copy, the length and the CRC-32."""
        source, name = data_path(self._source, name), name_in_copy(name)
        path = os.path.join(folder.temporary, name)
        found = stat_of(source)
        entry = known.get(name)
        if entry is not None and (entry.bytes, entry.modified_ns) == (found.size, found.modified_ns):
            self._report.resumed_files += 1
            self._report.resumed_bytes += entry.bytes
            return name, entry.bytes, entry.crc
        storage_at(os.path.dirname(path)).make()
        storage_at(folder.temporary).remove(name)

        def create(make: Callable[[str], _C.FileWriter]) -> _C.FileWriter:
            return make(path)

        length, crc = transfer.copy(source, folder.temporary, create)
        if not is_metadata_file(name):  # copied each time: they say what the other files must be
            folder.note([name, length, crc, found.modified_ns])
        return name, length, crc

    def _remove_others(self, temporary: str) -> None:
        """Removes what a copy that died took of an earlier state of the source."""
        names = {JOURNAL_NAME, *map(name_in_copy, self._names), *([] if self._made is None else [DELTA_NAME])}
        for name in storage_at(temporary).names():
            if name not in names and is_file(os.path.join(temporary, name)):
                storage_at(temporary).remove(name)

    def _check_destination(self) -> None:
        """Raises `CheckpointError` unless the copy may take its name. With `overwrite` it replaces a checkpoint, but
        not a folder with anything else in it."""
        path = self._path
        if not os.path.lexists(path):
            return
        _check_not_same(self._source, path)
        if not is_folder(path):
            raise CheckpointError(f"{path} is no folder, where one would be written", path=path)
        names = storage_at(path).names()
        if not names:
            return
        if not self._overwrite:
            raise exists(path)
        check_replaceable(path)
        try:
            of_checkpoint = files_of_checkpoint(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not replaced: {error}", path=path) from None
        replaced, others = names_to_copy(path, of_checkpoint)
        expected = {*self._names, *of_checkpoint, INDEX_NAME, DELTA_NAME}
        others = [name for name in others if is_folder(os.path.join(path, name))]
        others += [name for name in replaced if name not in expected and not is_metadata_file(name)]
        if others:
            raise CheckpointError(f"{path} holds {min(others)}, too, and is not replaced: remove it first", path=path)


def _check_not_same(source: str, path: str) -> None:
    if os.path.exists(path) and stat_of(source).identity[:2] == stat_of(path).identity[:2]:
        raise CheckpointError(f"{path} would be copied onto itself", path=path)


# --- What was copied before


@dataclass(frozen=True)
class _Complete:
    """A file that an earlier copy has completed."""

    bytes: int
    crc: int
    modified_ns: int  #: of the source


def _complete_files(folder: ResumableFolder, transfer: Transfer) -> dict[str, _Complete]:
    """The files that are in the folder as the journal says: they are read, and compared with their checksums."""
    found: dict[str, _Complete] = {}
    for entry in folder.journal():
        if isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str):
            found[entry[0]] = _Complete(*entry[1:])
    return {name: entry for name, entry in found.items() if _is_there(folder.temporary, name, entry, transfer)}


def _is_there(temporary: str, name: str, entry: _Complete, transfer: Transfer) -> bool:
    path = os.path.join(temporary, name)
    try:
        return stat_of(path).size == entry.bytes and transfer.crc_of(path, entry.bytes) == entry.crc
    except (OSError, CheckpointError):
        return False


# --- What was written


def _compare(
    source: str,
    made: str,
    files: Sequence[tuple[str, int, int]],
    transfer: Transfer,
    report: CopyReport,
) -> None:
    """Reads back what was written to `made`. Raises `CorruptCheckpointError` if it is damaged, with the place in the
    source if that is damaged too."""
    begun = transfer.done

    def progress(done: int, total: int) -> None:
        transfer.moved(begun + done - transfer.done)

    found = verify_checkpoint(made, False, progress, must_exist=True)
    if found.unreadable:
        first = found.unreadable[0]
        raise CheckpointError(f"the copy of {source} cannot be read back: {first.reason}", path=first.file)
    if found.damaged:
        _raise_damage(verify_checkpoint(source, False, must_exist=True))
        first = found.damaged[0]
        raise CorruptCheckpointError(
            f"the copy differs from {source}, which is sound: {first.reason}", key=first.key, file=source
        )
    report.unverified_bytes = found.unverified_bytes
    covered = found.files and not (found.unverified_bytes or found.harmless)  # all data, by the checkpoint's checksums
    for name, length, crc in files:
        if covered and name.endswith((DEFAULT_SUFFIX, SUFFIX)):
            continue
        path = os.path.join(made, name) if name else made
        if transfer.crc_of(path, length) != crc:
            raise CorruptCheckpointError(f"{path} cannot be read back as it was written", key=None, file=path)


def _raise_damage(found: VerifyReport) -> None:
    """Raises `CorruptCheckpointError` for the first damage of a report, or else `CheckpointError` for what could not be
    read."""
    if not found.damaged and found.unreadable:
        raise CheckpointError(found.reason, path=found.unreadable[0].file)
    if not found.damaged:
        return
    first, more = found.damaged[0], len(found.damaged) - 1
    reason = first.reason if first.key is None or first.key in first.reason else f"{first.key}: {first.reason}"
    where = "" if first.file in reason else f" in {first.file} at {first.offset}"
    text = reason + where + (f" (and {more:,} more)" if more else "")
    raise CorruptCheckpointError(text, key=first.key, file=first.file, offset=first.offset)
