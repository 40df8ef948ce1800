"""Checks a native checkpoint without loading it: metadata, index, data files, records and tables of checksums."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from ..._engine import _C
from ..._engine.engine_errors import of_system
from ..._storage.open_storage import is_inconclusive, stat_of, storage_at
from ..._storage.paths import check_relative
from ...errors import CheckpointError
from ...reports import Damage, VerifyReport
from ..checkpoint import Chunk
from ..damage import add_error
from . import metadata_check, metadata_file
from .explain_missing import explained
from .file_names import NODE_MARKER, index_name, metadata_name

if TYPE_CHECKING:
    from ..check_records import Progress
    from .native_checkpoint import NativeCheckpoint


def check_native(directory: str, report: VerifyReport, progress: Progress | None) -> None:
    """Adds all damage to the report. Calls `progress` for one metadata file after another."""
    try:
        ranks = metadata_file.metadata_ranks(directory) or [None]
    except OSError as error:
        if is_inconclusive(error.errno, directory):
            add_error(report, of_system(error, directory), directory)
            return
        ranks = [None]
    for rank in ranks:
        with storage_at(directory).share(metadata_name(rank)):
            try:
                with explained(directory):
                    _check_metadata_file(directory, rank, report, progress)
            except CheckpointError as error:
                add_error(report, error, os.path.join(directory, metadata_name(rank)))


def _check_metadata_file(directory: str, rank: int | None, report: VerifyReport, progress: Progress | None) -> None:
    path, index_path = (os.path.join(directory, name(rank)) for name in (metadata_name, index_name))
    data = metadata_file.metadata_bytes(directory, rank)
    index = metadata_file.read_index(directory, rank, data)
    ends = None
    if index is not None:
        metadata_check.check(data, path)  # the index matches the checksum at its end
        with suppress(_C.EngineError):  # a damaged index is harmless: the metadata has the same content
            names_and_ends = zip(index.files, index.file_ends(), strict=True)
            ends = {check_relative(name, directory): end for name, end in names_and_ends}
            report.indexed = True
    if index is not None and ends is not None and report.quick:
        report.keys += len(index)
        report.files += len(ends)
        _check_files(directory, ends, report)
        return
    from ..check_records import check_records, file_ends  # the answers above need no torch
    from .metadata_pickle import loads
    from .native_checkpoint import NativeCheckpoint

    if not metadata_check.has_checksum(data):
        report.unchecked.append(f"{path} has no checksum: only its structure was checked")
    checkpoint = NativeCheckpoint.of(directory, rank, loads(data, path))
    for fault in checkpoint.faults():
        add_error(report, fault, path)
    listed = file_ends(checkpoint)
    report.keys += len(checkpoint.tensors) + len(checkpoint.objects)
    report.files += len(listed)
    missing = _check_files(directory, listed, report)
    if not report.quick:
        wrappers = check_records(checkpoint, missing, report, progress)
        _check_index(checkpoint, index is not None, index_path, report)
        _check_tables(checkpoint, wrappers, missing, report)


def _check_index(checkpoint: NativeCheckpoint, counts: bool, path: str, report: VerifyReport) -> None:
    try:
        _, index = metadata_file.open_index(checkpoint.path, checkpoint.rank)
    except (_C.EngineError, OSError) as error:
        if error.errno != errno.ENOENT:
            report.harmless.append(Damage(None, path, getattr(error, "offset", 0), str(error)))
        return
    if counts and not _says_the_same(index, checkpoint):
        report.damaged.append(Damage(None, path, 0, f"{path} contradicts the metadata that it belongs to"))


def _says_the_same(index: _C.Index, checkpoint: NativeCheckpoint) -> bool:
    """Whether a sound index holds what the checkpoint's metadata holds."""
    if len(index) != len(checkpoint.tensors) + len(checkpoint.objects):
        return False
    try:
        index.check_counts()  # it may claim more chunks than its metadata has room for
        files = index.files
        for number in range(len(index)):
            name, dtype, shape, places = index.row(number)  # no two are of one name
            chunks = [
                Chunk(offsets, sizes, check_relative(files[file], name), offset, length, crc)
                for offsets, sizes, file, offset, length, crc in places
            ]
            tensor = checkpoint.tensors.get(name)
            expected = checkpoint.objects.get(name) if tensor is None else tensor.chunks
            if tensor is not None and (f"torch.{dtype}", shape) != (str(tensor.dtype), tuple(tensor.shape)):
                return False
            if ([expected] if isinstance(expected, Chunk) else expected) != chunks:
                return False
    except (_C.EngineError, CheckpointError):  # it names what is not there
        return False
    return True


def _check_tables(
    checkpoint: NativeCheckpoint, wrappers: set[tuple[str, int]], missing: Collection[str], report: VerifyReport
) -> None:
    """Checks the tables of block checksums at the end of data files of this package. A damaged table is harmless:
    without it a load of a part of a tensor reads and verifies the whole record. `wrappers`: from `check_records`."""
    storage = storage_at(checkpoint.root)
    crcs: dict[str, dict[int, int]] = {}
    for tensor in checkpoint.tensors.values():
        for chunk in tensor.chunks:
            is_wrapper = (chunk.file, chunk.offset) in wrappers  # it is read as a whole
            if chunk.crc >= 0 and chunk.file not in missing and not is_wrapper:
                crcs.setdefault(chunk.file, {})[chunk.offset] = chunk.crc
    for name, expected in crcs.items():
        path = os.path.join(checkpoint.root, name)
        try:
            rows, offset = _C.checksum_table(path)
            if rows is None and storage.rereads:
                storage.drop_caches()
                rows, offset = _C.checksum_table(path)
        except _C.EngineError as error:
            report.harmless.append(Damage(None, path, error.offset, str(error)))
            continue
        if rows is None:
            reason = f"{path} does not end in a sound table of checksums: it is damaged or truncated"
            report.harmless.append(Damage(None, path, offset, reason))
        elif not expected.items() <= dict(rows).items() or len(rows) != len(expected):
            reason = f"the table of checksums of {path} is of other records than the metadata"
            report.harmless.append(Damage(None, path, offset, reason))


def _check_files(directory: str, ends: dict[str, int], report: VerifyReport) -> dict[str, bool]:
    """Checks that each data file exists and is a regular file. Returns the names of the others, and
    whether that is damage. Checks lengths only with `quick`: otherwise the records are read."""
    bad: dict[str, bool] = {}
    storage = storage_at(directory)
    known: dict[str, int] = {}
    with suppress(OSError):
        known = storage.sizes()
    is_part = NODE_MARKER in known if known else storage.has(NODE_MARKER)
    for name, end in ends.items():
        if known.get(name, -1) >= end:
            continue
        path = os.path.join(directory, name)
        try:
            found = stat_of(path)
        except OSError as error:
            bad[name] = not is_part and not is_inconclusive(error.errno, path)
            if bad[name]:
                report.damaged.append(Damage(None, path, 0, f"data file is missing: {error}"))
            elif is_part and isinstance(error, FileNotFoundError):
                reason = f"{path} is not here: {directory} has one node's part of a checkpoint"
                report.unreadable.append(Damage(None, path, 0, reason))
            else:
                report.unreadable.append(Damage(None, path, 0, f"data file cannot be read: {error}"))
            continue
        if not found.is_file:
            bad[name] = True
            report.damaged.append(Damage(None, path, 0, f"{path} is not a regular file"))
        elif found.size < end and report.quick:
            reason = f"file {path} is truncated: it has {found.size} bytes, its last record ends at {end}"
            report.damaged.append(Damage(None, path, found.size, reason))
    return bad
