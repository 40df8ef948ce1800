"""Copies one checkpoint of any format file by file, verified, for `vescale-ckpt copy`.

What is read gets a CRC-32 on the way. What was written is then read back: each record is compared with the checksums
that the checkpoint has, and each file that has bytes without checksums with the CRC-32 of what was read. Only then does
the copy get its name. A copy that was killed leaves its folder, and the next one copies only the files that are missing
there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from .. import settings
from .._engine import _C
from .._engine.errors import check_space, named_errors, named_system_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.overlap import overlap
from .._engine.rows import int_table
from .._hf.contents import INDEX_SUFFIX, SUFFIX, SafetensorsContents
from .._hf.names import is_temporary_index, token_of
from .._native import delta_table, metadata_file
from .._native.commit import remove_leftovers
from .._native.delta_table import DeltaTable
from .._native.named_files import check_replaceable, named_files
from .._native.names import (
    DELTA_NAME,
    INDEX_NAME,
    MARK_NAME,
    METADATA_NAME,
    is_metadata_file,
    is_temporary_file,
    metadata_name,
)
from .._read import contents
from .._read.check_records import Progress, list_records
from .._read.no_checkpoint import explained
from .._storage.directory import Directory, checkpoint_path, directory_at, is_file, is_folder, stat_of
from .._storage.locks import LOCK_NAME
from .._storage.pending import PendingFile
from .._storage.resumable import JOURNAL_NAME, ResumableFolder
from .._storage.siblings import data_path, in_sibling
from .._storage.urls import is_url
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import VerifyReport
from ..settings import checked_flag, checked_path
from .check import verify_any
from .formats import open_source
from .pipeline import Buffers

_DCP_SUFFIX = ".distcp"


@dataclass
class CopyReport:
    """What a copy did."""

    path: str  #: of the copy
    seconds: float = 0.0
    files: int = 0
    bytes: int = 0  #: of all files
    resumed_files: int = 0  #: of these were complete when the copy began
    resumed_bytes: int = 0
    unverified_bytes: int = 0  #: of tensors without checksums: only compared with what was read
    left_out: list[str] = field(default_factory=list)  #: names in the source that do not belong to the checkpoint


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
            lock = directory_at(source).share(metadata_name(None))
            if lock is not None:
                held.callback(lock.release)
            if is_url(path):
                _StoreCopy(source, path, overwrite, report, progress).run()
            else:
                _FolderCopy(source, path, overwrite, report, progress).run()
        else:
            _copy_file(source, path, overwrite, report, progress)
    report.seconds = time.perf_counter() - began
    return report


def _copy_file(source: str, path: str, overwrite: bool, report: CopyReport, progress: Progress | None) -> None:
    with closing(open_source(source)):
        pass  # it is a checkpoint
    _check_file_destination(source, path, overwrite)
    transfer = _Transfer(2 * stat_of(source).size, progress)
    directory_at(os.path.dirname(path)).make()
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
        raise _exists(path)


class _FolderCopy:
    def __init__(self, source: str, path: str, overwrite: bool, report: CopyReport, progress: Progress | None) -> None:
        self._source = source
        self._path = path
        self._overwrite = overwrite
        self._report = report
        self._progress = progress
        self._metadata = _metadata_files(source)  # before they are read
        of_checkpoint = _files_of_checkpoint(source)
        self._names, report.left_out = _names_to_copy(source, of_checkpoint)
        self._made = _SelfContained.of(source, of_checkpoint)  # in place of files of the source
        if self._made is not None:
            self._names = [name for name in self._names if name not in (INDEX_NAME, DELTA_NAME)]

    def run(self) -> None:
        report = self._report
        self._check_destination()
        sizes = {name: stat_of(data_path(self._source, name)).size for name in self._names}
        transfer = _Transfer(2 * sum(sizes.values()), self._progress)
        folder = ResumableFolder(self._path)
        try:
            folder.make()
            known = _complete_files(folder, transfer)
            check_space(folder.directory, sum(size for name, size in sizes.items() if name_in_copy(name) not in known))
            done = [self._copy(name, folder, known, transfer) for name in self._names]
            if _metadata_files(self._source) != self._metadata:
                raise CheckpointError(f"{self._source} was saved to while it was copied", path=self._source)
            if self._made is not None:
                done = [self._made.written(folder.temporary) if entry[0] == METADATA_NAME else entry for entry in done]
            self._remove_others(folder.temporary)
            _compare(self._source, folder.temporary, done, transfer, report)
            for name in {os.path.dirname(name_in_copy(name)) for name in self._names} - {""}:
                directory_at(os.path.join(folder.temporary, name)).sync()
            self._check_destination()
            folder.commit()
        except KeyboardInterrupt:
            folder.leave()
            raise
        finally:
            folder.discard()
        report.files, report.bytes = len(done), sum(length for _, length, _ in done)

    def _copy(
        self, name: str, folder: ResumableFolder, known: dict[str, _Complete], transfer: _Transfer
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
        directory_at(os.path.dirname(path)).make()
        directory_at(folder.temporary).remove(name)

        def create(make: Callable[[str], _C.FileWriter]) -> _C.FileWriter:
            return make(path)

        length, crc = transfer.copy(source, folder.temporary, create)
        if not is_metadata_file(name):  # copied each time: they say what the other files must be
            folder.note([name, length, crc, found.modified_ns])
        return name, length, crc

    def _remove_others(self, temporary: str) -> None:
        """Removes what a copy that died took of an earlier state of the source."""
        names = {JOURNAL_NAME, *map(name_in_copy, self._names), *([] if self._made is None else [DELTA_NAME])}
        for name in directory_at(temporary).names():
            if name not in names and is_file(os.path.join(temporary, name)):
                directory_at(temporary).remove(name)

    def _check_destination(self) -> None:
        """Raises `CheckpointError` unless the copy may take its name. With `overwrite` it replaces a checkpoint, but
        not a folder with anything else in it."""
        path = self._path
        if not os.path.lexists(path):
            return
        _check_not_same(self._source, path)
        if not is_folder(path):
            raise CheckpointError(f"{path} is no folder, where one would be written", path=path)
        names = directory_at(path).names()
        if not names:
            return
        if not self._overwrite:
            raise _exists(path)
        check_replaceable(path)
        try:
            of_checkpoint = _files_of_checkpoint(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not replaced: {error}", path=path) from None
        replaced, others = _names_to_copy(path, of_checkpoint)
        both = {*self._names, *of_checkpoint}
        others = [name for name in others if is_folder(os.path.join(path, name))]
        others += [name for name in replaced if name not in both and not is_metadata_file(name) and name != INDEX_NAME]
        if others:
            raise CheckpointError(f"{path} holds {min(others)}, too, and is not replaced: remove it first", path=path)


class _StoreCopy:
    """A copy to an object store: data files under their own names, and last the file that makes them a checkpoint. What
    a copy that died has sent of the same checkpoint is not sent again.

    Args:
        bytes_per_second: most that it sends; 0: no limit.
        read_back: whether data files are read again and compared, before the copy counts.
    """

    def __init__(
        self,
        source: str,
        path: str,
        overwrite: bool,
        report: CopyReport,
        progress: Progress | None,
        *,
        bytes_per_second: int = 0,
        read_back: bool = True,
    ) -> None:
        self._source = source
        self._path = path
        self._overwrite = overwrite
        self._report = report
        self._progress = progress
        self._bytes_per_second = bytes_per_second
        self._read_back = read_back
        self._cancelled = False

    def cancel(self) -> None:
        """Ends `run` soon, from any thread. What was sent stays for the next copy."""
        self._cancelled = True

    def run(self) -> None:
        report, source, storage = self._report, directory_at(self._source), directory_at(self._path)
        metadata = _metadata_files(self._source)  # before they are read
        of_checkpoint = _files_of_checkpoint(self._source)
        names, report.left_out = _names_to_copy(self._source, of_checkpoint)
        made = _SelfContained.of(self._source, of_checkpoint)  # in place of files of the source
        if made is not None:
            names = [name for name in names if name not in (INDEX_NAME, DELTA_NAME)]
        last = [name for name in names if _completes(name)]
        superseded, sent = self._sent_before(storage, last, set(map(name_in_copy, of_checkpoint)))
        sizes = {name: stat_of(data_path(self._source, name)).size for name in names}
        total = (1 + self._read_back) * sum(sizes.values())
        transfer = _Transfer(total, self._progress, self._bytes_per_second, self._check)
        for name in (name for name in names if name not in last):
            self._check()
            url, size = os.path.join(self._path, name_in_copy(name)), sizes[name]
            if name_in_copy(name) in sent and stat_of(url).size == size and not self._read_back:
                report.resumed_files, report.resumed_bytes = report.resumed_files + 1, report.resumed_bytes + size
                transfer.moved(size)
                continue
            _, crc = transfer.copy(data_path(self._source, name), self._path, partial(_made_at, url))
            report.files, report.bytes = report.files + 1, report.bytes + size
            if self._read_back and transfer.crc_of(url, size) != crc:
                raise CorruptCheckpointError(f"{url} cannot be read back as it was written", key=None, file=url)
        contents_of_last = [(name, source.read(name)) for name in last]
        if made is not None:
            others = [entry for entry in contents_of_last if entry[0] != METADATA_NAME]
            contents_of_last = [*others, (DELTA_NAME, made.delta), (METADATA_NAME, made.metadata)]
        if _metadata_files(self._source) != metadata:
            raise CheckpointError(f"{self._source} was saved to while it was copied", path=self._source)
        for name, content in contents_of_last:
            storage.commit(name, content, self._overwrite)
            report.files, report.bytes = report.files + 1, report.bytes + len(content)
        if superseded:
            remove_leftovers(self._path, superseded)

    def _sent_before(self, storage: Directory, last: list[str], of_checkpoint: set[str]) -> tuple[set[str], set[str]]:
        """The data files of the checkpoint that is there, which this one replaces; and what a copy of this one has
        sent. Raises `CheckpointError` if the copy must not be made."""
        try:
            there = set(storage.names())
        except FileNotFoundError:
            return set(), set()
        if not any(map(_completes, there)) and last:
            return set(), there
        if not self._overwrite:
            raise _exists(self._path)
        if both := sorted(there & of_checkpoint):  # while they are written, the old checkpoint would be a mixture
            raise CheckpointError(
                f"{self._path} holds {both[0]} already, which the copy would write, and is not replaced: remove it "
                "first",
                path=self._path,
            )
        return named_files(self._path, None), set()

    def _check(self) -> None:
        if self._cancelled:
            raise CheckpointError(f"copying {self._source} to {self._path} was stopped", path=self._path)


def _made_at(url: str, make: Callable[[str], _C.FileWriter]) -> _C.FileWriter:
    return make(url)


def upload(source: str, url: str, bytes_per_second: int) -> tuple[Callable[[], CopyReport], Callable[[], None]]:
    """Two functions: one copies a checkpoint of a local folder to an object store, within a rate; one ends that soon,
    from another thread. A checkpoint that is there already is replaced."""
    report = CopyReport(url)
    copying = _StoreCopy(source, url, True, report, None, bytes_per_second=bytes_per_second, read_back=False)

    def run() -> CopyReport:
        with named_system_errors(url):
            copying.run()
        return report

    return run, copying.cancel


def _completes(name: str) -> bool:
    """Whether a file of that name makes the others a checkpoint, and is written last."""
    return is_metadata_file(name) or name.endswith(INDEX_SUFFIX)


def _check_not_same(source: str, path: str) -> None:
    if os.path.exists(path) and stat_of(source).identity[:2] == stat_of(path).identity[:2]:
        raise CheckpointError(f"{path} would be copied onto itself", path=path)


def _exists(path: str) -> CheckpointError:
    return CheckpointError(f"{path} exists: it is only replaced with overwrite=True (--overwrite)", path=path)


# --- Which files


def _files_of_checkpoint(path: str) -> set[str]:
    """The files with the tensors and objects of the checkpoint in a folder. Raises if there is no sound one."""

    def fail(error: CheckpointError) -> None:
        raise error

    if ranks := metadata_file.metadata_ranks(path):
        named: set[str] = set()
        with explained(path):
            for rank in ranks:
                found = contents.read(path, rank, True, by_index=False)
                where = os.path.join(path, metadata_name(rank))
                named |= {os.path.normpath(name) for name in list_records(found, where, rank is None, fail).ends}
        return named
    if contents.is_safetensors(path):
        return set(SafetensorsContents.read(path, verify=True).files)
    with closing(open_source(path)) as source:
        return {os.path.basename(source.location(key)[0]) for key in source.tensors}


def _metadata_files(path: str) -> dict[str, tuple[int, ...]]:
    """The files that say which others are the checkpoint, with what tells their versions apart."""
    storage = directory_at(path)
    found = [name for name in storage.names() if is_metadata_file(name) or name.endswith(INDEX_SUFFIX)]
    return {name: storage.stat(name).identity for name in found}


def _names_to_copy(path: str, of_checkpoint: set[str]) -> tuple[list[str], list[str]]:
    """The files to copy, `.metadata` last, and the names that are left out."""
    other, left_out = set(), []
    for name in directory_at(path).names():
        if name in (LOCK_NAME, MARK_NAME) or name in of_checkpoint:
            continue
        is_left = is_temporary_file(name) or is_temporary_index(name) or token_of(name) is not None
        is_unnamed = name.endswith((_DCP_SUFFIX, SUFFIX))  # of another save or model
        if is_left or is_unnamed or not is_file(os.path.join(path, name)):
            left_out.append(name)
        else:
            other.add(name)
    for name in sorted(of_checkpoint):
        file = data_path(path, name)
        if not is_file(file):
            raise CorruptCheckpointError(f"data file {file} is missing, or no regular file", key=None, file=file)
    return sorted(of_checkpoint | other, key=lambda name: (_completes(name), name)), sorted(left_out)


# --- A delta save, which names files of other checkpoints


def name_in_copy(name: str) -> str:
    """The name that a data file gets in a copy."""
    found = in_sibling(name)
    return name if found is None else found.file


@dataclass(frozen=True)
class _SelfContained:
    """Metadata that names the files of a copy, of a checkpoint that names files of others."""

    metadata: bytes
    delta: bytes

    @classmethod
    def of(cls, source: str, of_checkpoint: set[str]) -> _SelfContained | None:
        """None for a checkpoint that names its own files only."""
        if not any(map(in_sibling, of_checkpoint)):
            return None
        if len(set(map(name_in_copy, of_checkpoint))) < len(of_checkpoint):
            raise CheckpointError(f"{source} names files of equal names in several folders: convert it", path=source)
        metadata = metadata_file.read_metadata(source)
        for info in {id(info): info for info in metadata.storage_data.values()}.values():
            info.relative_path = name_in_copy(info.relative_path)
        content = metadata_file.dumps(metadata)
        try:
            table = delta_table.read(source)
        except CheckpointError:  # it cannot be a base, nor can the copy
            table = DeltaTable(bytes(delta_table.SEED_BYTES), [], b"")
        return cls(content, replace(table, files=[*map(name_in_copy, table.files)]).pack(content))

    def written(self, folder: str) -> tuple[str, int, int]:
        """Replaces the copied metadata. Returns name, length and CRC-32."""
        directory_at(folder).write(DELTA_NAME, self.delta)
        directory_at(folder).write(METADATA_NAME, self.metadata)
        return METADATA_NAME, len(self.metadata), _C.crc32(self.metadata)


# --- What was copied before


@dataclass(frozen=True)
class _Complete:
    """A file that an earlier copy has completed."""

    bytes: int
    crc: int
    modified_ns: int  #: of the source


def _complete_files(folder: ResumableFolder, transfer: _Transfer) -> dict[str, _Complete]:
    """The files that are in the folder as the journal says: they are read, and compared with their checksums."""
    found: dict[str, _Complete] = {}
    for entry in folder.journal():
        if isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str):
            found[entry[0]] = _Complete(*entry[1:])
    return {name: entry for name, entry in found.items() if _is_there(folder.temporary, name, entry, transfer)}


def _is_there(temporary: str, name: str, entry: _Complete, transfer: _Transfer) -> bool:
    path = os.path.join(temporary, name)
    try:
        return stat_of(path).size == entry.bytes and transfer.crc_of(path, entry.bytes) == entry.crc
    except (OSError, CheckpointError):
        return False


# --- Bytes


class _Transfer:
    """Copies files and reads them back, in bounded memory, and tells of its progress."""

    def __init__(
        self,
        total: int,
        progress: Progress | None,
        bytes_per_second: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called between pieces, and may raise."""
        self.done = 0
        self.total = total
        self._progress = progress
        self._buffers = Buffers()
        self._check = check
        self._options = engine_options(None, direct_io_setting("auto"), bytes_per_second=bytes_per_second)

    def moved(self, count: int) -> None:
        self.done = min(self.total, self.done + count)
        if self._progress is not None:
            self._progress(self.done, self.total)

    def copy(
        self, source: str, directory: str, create: Callable[[Callable[[str], _C.FileWriter]], _C.FileWriter]
    ) -> tuple[int, int]:
        """Copies a file durably and returns its length and CRC-32. `create` calls the function that it gets with the
        path. Raises `CheckpointError` if the file changes meanwhile."""
        before = stat_of(source)
        with named_errors(str, directory, before.size):
            writer = create(lambda path: _C.FileWriter.exactly(path, before.size, self._options, False))

            def write(piece: _Piece) -> int:
                writer.write_bytes(piece.buffer.data_ptr(), piece.bytes, piece.offset)
                return _C.crc32_of_memory(piece.buffer.data_ptr(), piece.bytes)

            crc = self._through(source, before.size, write)
            writer.finish_bytes(b"", sync=True)
        if stat_of(source).identity != before.identity:
            raise CheckpointError(f"{source} was changed while it was copied", path=source)
        return before.size, crc

    def crc_of(self, path: str, length: int) -> int:
        """The CRC-32 of a file."""
        return self._through(path, length, lambda piece: _C.crc32_of_memory(piece.buffer.data_ptr(), piece.bytes))

    def _through(self, path: str, length: int, use: Callable[[_Piece], int]) -> int:
        """Calls `use`, which returns a CRC-32, with the pieces of a file. Returns the CRC-32 of all."""
        crc = 0
        for piece, found in overlap(self._pieces(path, length), use):
            crc = _C.crc32_combine(crc, found, piece.bytes)
            self._buffers.give_back(piece.buffer)
            self.moved(piece.bytes)
        return crc

    def _pieces(self, path: str, length: int) -> Iterator[_Piece]:
        for offset in range(0, length, self._buffers.bytes):
            self._check()
            piece = _Piece(self._buffers.take(), offset, min(self._buffers.bytes, length - offset))
            with named_errors(lambda _: os.path.basename(path), path):
                _C.read_bytes([path], int_table((0, offset, piece.bytes, piece.buffer.data_ptr())), self._options)
            yield piece


@dataclass(frozen=True)
class _Piece:
    """A range of a file, in memory."""

    buffer: torch.Tensor
    offset: int
    bytes: int


# --- What was written


def _compare(
    source: str,
    made: str,
    files: Sequence[tuple[str, int, int]],
    transfer: _Transfer,
    report: CopyReport,
) -> None:
    """Reads back what was written to `made`. Raises `CorruptCheckpointError` if it is damaged, with the place in the
    source if that is damaged too."""
    begun = transfer.done

    def progress(done: int, total: int) -> None:
        transfer.moved(begun + done - transfer.done)

    found = verify_any(made, False, progress)
    if found.damaged:
        _raise_damage(verify_any(source, False))
        first = found.damaged[0]
        raise CorruptCheckpointError(
            f"the copy differs from {source}, which is sound: {first.reason}", key=first.key, file=source
        )
    report.unverified_bytes = found.unverified_bytes
    covered = found.files and not (found.unverified_bytes or found.harmless)  # all data, by the checkpoint's checksums
    for name, length, crc in files:
        if covered and name.endswith((_DCP_SUFFIX, SUFFIX)):
            continue
        path = os.path.join(made, name) if name else made
        if transfer.crc_of(path, length) != crc:
            raise CorruptCheckpointError(f"{path} cannot be read back as it was written", key=None, file=path)


def _raise_damage(found: VerifyReport) -> None:
    """Raises `CorruptCheckpointError` for the first damage of a report."""
    if not found.damaged:
        return
    first, more = found.damaged[0], len(found.damaged) - 1
    reason = first.reason if first.key is None or first.key in first.reason else f"{first.key}: {first.reason}"
    where = "" if first.file in reason else f" in {first.file} at {first.offset}"
    text = reason + where + (f" (and {more:,} more)" if more else "")
    raise CorruptCheckpointError(text, key=first.key, file=first.file, offset=first.offset)
