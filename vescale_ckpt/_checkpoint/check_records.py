"""Checks every byte of the records of a checkpoint, native or safetensors, for `verify`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

from .._engine import _C
from .._engine.dtype_codes import DTYPE_CODES, dtype_code
from .._engine.engine_errors import named_errors, named_system_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.overlap import groups_of, overlap
from .._engine.rows import int_table
from .._storage.open_storage import is_inconclusive, read_twice, stat_of, storage_at
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import Damage, VerifyReport
from .checkpoint import Checkpoint, PlacedChunk
from .damage import add_error, raise_damage
from .loadable import LoadableCheckpoint
from .non_contiguous_records import wrong_form
from .record_reader import Record

Progress = Callable[[int, int], None]  #: takes the bytes that are done and the bytes of all
_GROUP_BYTES = 1 << 30  # `Progress` is called after so many bytes at most, except for larger tensors


def file_ends(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns {file name: end of the last record in it}."""
    ends: dict[str, int] = {}
    for _, _, chunk in checkpoint.chunks():
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.bytes)
    return ends


def check_file(checkpoint: LoadableCheckpoint, name: str, path: str) -> None:
    """Reads all records of one data file of the checkpoint. `path` is where it lies now, perhaps under another name.

    Raises `CorruptCheckpointError` with the key, file and offset of the first damage, and `CheckpointError` if the file
    cannot be read, or the checkpoint names none that is called `name`. The first call for a checkpoint lists its
    records.
    """
    chunks = checkpoint.chunks_by_file.get(name)
    if chunks is None:
        raise CheckpointError(f"{checkpoint.path} names no data file {name}, which {path} would be", path=path)
    with named_system_errors(path):
        if not stat_of(path).is_file:
            raise CorruptCheckpointError(f"{path} is not a regular file", key=None, file=path)
    report = VerifyReport(path, False)
    _check(checkpoint, os.path.dirname(path), {name: path}, chunks, report)
    raise_damage(report)


def check_records(
    checkpoint: LoadableCheckpoint, missing: Mapping[str, bool], report: VerifyReport, progress: Progress | None = None
) -> set[tuple[str, int]]:
    """Reads all records except those in files of `missing`, and adds damage to the report. Returns file and offset of
    the records of wrapper subclasses. `missing`: whether it is damage that a file is not there; else it may exist."""
    paths = {name: os.path.join(checkpoint.root, name) for name in file_ends(checkpoint)}

    def there() -> Iterator[PlacedChunk]:
        for placed in checkpoint.chunks():
            key, _, chunk = placed
            if chunk.file not in missing:
                yield placed
                continue
            kind = report.damaged if missing[chunk.file] else report.unreadable
            kind.append(Damage(key, paths[chunk.file], chunk.offset, "its data file is missing"))

    return _check(checkpoint, checkpoint.root, paths, there(), report, progress)


def _check(
    checkpoint: LoadableCheckpoint,
    root: str,
    path_of: Mapping[str, str],
    chunks: Iterable[PlacedChunk],
    report: VerifyReport,
    progress: Progress | None = None,
) -> set[tuple[str, int]]:
    """Does the same for chunks of the checkpoint, whose files lie in `root`. `path_of`: their paths by their names."""
    names, paths = list(path_of), list(path_of.values())
    numbers = {name: number for number, name in enumerate(names)}
    is_safetensors = checkpoint.format == "safetensors"
    archives: list[tuple[Record, bool]] = []  # (record, whether it holds a tensor)
    tensors: list[Record] = []
    for key, dtype, chunk in chunks:
        report.bytes += chunk.bytes
        record = Record(key, numbers[chunk.file], chunk.offset, chunk.bytes, chunk.crc, dtype, chunk.sizes)
        if key in checkpoint.tensors and dtype in DTYPE_CODES:
            tensors.append(record)
        else:
            archives.append((record, key in checkpoint.tensors))
    storage = storage_at(root)
    options = engine_options(None, direct_io_setting("auto"), requests=storage.by_requests)
    reads = _C.SafetensorsReads(True, options) if is_safetensors else None

    def check(
        group: tuple[list[Record], array[int]],
    ) -> tuple[list[tuple[int, int, str, int]], list[int], int] | CheckpointError:
        records, table = group
        try:
            where = root if reads is None else paths[records[0].file]
            with named_errors(lambda row: records[row].key, where):
                if reads is None:
                    return _C.check_tensors(paths, table, options)
                return reads.check_tensors(paths, table)
        except CheckpointError as error:  # a file cannot be read, or was replaced after its records were listed
            return error

    done, total = 0, sum(record.length for record in tensors)
    again: list[Record] | None = [] if storage.rereads else None  # records to read again; None: damage is reported
    while tensors:
        for (group, _), found in overlap(_groups(tensors, by_file=is_safetensors), check):
            if progress is not None:
                done = min(total, done + sum(record.length for record in group))
                progress(done, total)
            if isinstance(found, CheckpointError):
                if again is not None and isinstance(found, CorruptCheckpointError):
                    again += group
                else:
                    add_error(report, found, paths[group[0].file])
                continue
            damaged, not_plain, unverified = found
            report.unverified_bytes += unverified
            for row, offset, reason, number in damaged:
                record = group[row]
                path = paths[record.file]
                if is_inconclusive(number, path):
                    report.unreadable.append(Damage(record.key, path, offset, reason))
                elif again is not None and not number:
                    again.append(record)
                else:
                    report.damaged.append(Damage(record.key, path, offset, reason))
            archives += [(group[row], True) for row in not_plain]
        tensors, again = again or [], None
        if tensors:
            storage.drop_caches()
            reads = _C.SafetensorsReads(True, options) if is_safetensors else None
    return {
        (names[record.file], record.offset)
        for record, of_tensor in archives
        if _check_archive(record, paths[record.file], of_tensor, report)
    }


def _groups(records: list[Record], *, by_file: bool) -> Iterator[tuple[list[Record], array[int]]]:
    """Yields tensors that are checked together, and their rows in the engine's table."""
    # The order is that of the files, so that neighbouring records are read together.
    records = sorted(records, key=lambda record: (record.file, record.offset))
    for _, of_file in groupby(records, lambda record: record.file if by_file else 0):
        for group in groups_of(of_file, lambda record: record.length, _GROUP_BYTES):
            table = int_table()
            for record in group:
                code = dtype_code(record.dtype, record.key)
                table.extend((record.file, record.offset, record.length, record.crc, code))
                table.extend((len(record.sizes), *record.sizes))
            yield group, table


def _check_archive(record: Record, path: str, of_tensor: bool, report: VerifyReport) -> bool:
    """Checks the record of an object, of a tensor that is not contiguous (a transposed one, say), or of a wrapper
    subclass. Returns whether it holds a wrapper. The CRC-32 of a wrapper is that of its archive, so its class, which
    may be unknown here, is not needed."""

    def check() -> tuple[bool, int, str]:
        plain, is_wrapper = of_tensor, False
        found = _C.check_archive_at(path, record.offset, record.length, record.crc)
        if of_tensor and record.crc >= 0:
            is_wrapper = not found[0]
            plain = not is_wrapper
            if plain:  # the CRC-32 in metadata is that of the elements
                found = _C.check_archive_at(path, record.offset, record.length, -1)
        wrong, offset, unverified, harmless = found
        if not wrong and plain:
            wrong = wrong_form(path, record.offset, record.length, record.dtype, record.sizes, record.crc)
        if wrong:
            raise CorruptCheckpointError(wrong, key=record.key, file=path, offset=offset)
        return is_wrapper, unverified, harmless

    try:
        is_wrapper, unverified, harmless = read_twice(path, check)
    except CorruptCheckpointError as error:
        add_error(report, error, path)
        return False
    except (_C.EngineError, OSError) as error:
        kind = report.unreadable if is_inconclusive(error.errno, path) else report.damaged
        kind.append(Damage(record.key, path, record.offset, str(error)))
        return False
    report.unverified_bytes += unverified
    if (
        not harmless and of_tensor and not is_wrapper and record.crc >= 0
    ):  # this package writes all records with a CRC-32 in one form
        harmless = "the bytes around its values are damaged"
    if harmless:
        report.harmless.append(Damage(record.key, path, record.offset, f"{record.key}: {harmless}"))
    return is_wrapper
