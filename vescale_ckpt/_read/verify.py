"""Checks a checkpoint that `load` takes without loading it."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from .. import settings
from .._checkpoint.native import metadata_file
from .._checkpoint.native.file_names import index_name, metadata_name
from .._checkpoint.safetensors.headers import SafetensorsContents
from .._engine import _C
from .._engine.errors import of_system
from .._engine.gc import gc_paused
from .._storage.open_storage import checkpoint_path, says_nothing, stat_of, storage_at
from .._storage.paths import check_relative, data_path
from ..errors import CheckpointError
from ..reports import Damage, VerifyReport
from ..settings import checked_flag, checked_path
from .check_records import Progress, add_error, check_records, check_tables, list_records
from .contents import Contents, is_safetensors, of_safetensors
from .no_checkpoint import explained


@gc_paused()
def verify_checkpoint(
    path: str | os.PathLike[str], *, quick: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """What the public `verify` reports of a checkpoint that `load` takes. `progress` is called with the bytes of one
    metadata file's tensors checked so far, and of all."""
    checked_flag("quick", quick)
    settings.check()
    directory = checkpoint_path(checked_path("path", path))
    report = VerifyReport(directory, quick)
    try:
        if is_safetensors(directory):
            _verify_safetensors(directory, report, progress)
        else:
            _verify_metadata_files(directory, report, progress)
    except CheckpointError as error:
        add_error(report, error, directory)
    _tell_what_is_unchecked(report)
    return report


def _verify_metadata_files(directory: str, report: VerifyReport, progress: Progress | None) -> None:
    try:
        ranks = metadata_file.metadata_ranks(directory) or [None]
    except OSError as error:
        if says_nothing(error.errno, directory):
            raise of_system(error, directory) from error
        ranks = [None]
    for rank in ranks:
        lock = storage_at(directory).share(metadata_name(rank))
        try:
            with explained(directory):
                _verify_metadata_file(directory, rank, report, progress)
        except CheckpointError as error:
            add_error(report, error, os.path.join(directory, metadata_name(rank)))
        finally:
            if lock is not None:
                lock.release()


def _verify_metadata_file(directory: str, rank: int | None, report: VerifyReport, progress: Progress | None) -> None:
    path, index_path = (os.path.join(directory, name(rank)) for name in (metadata_name, index_name))
    index = metadata_file.read_index(directory, rank)
    data = metadata_file.metadata_bytes(directory, rank)
    ends = None
    if index is not None:
        metadata_file.check(data, path)  # against its checksum, which the index holds too
        with suppress(_C.EngineError):  # a damaged index is harmless: the metadata has all that it has
            names_and_ends = zip(index.files, index.file_ends(), strict=True)
            ends = {check_relative(name, directory): end for name, end in names_and_ends}
            report.indexed = True
    if index is not None and ends is not None and report.quick:
        report.keys += len(index)
        report.files += len(ends)
        _check_files(directory, ends, report)
        return
    if not metadata_file.has_checksum(data):
        report.unchecked.append(f"{path} has no checksum: that it makes sense is all that is known")
    metadata = metadata_file.loads(data, path)
    listing = list_records(
        Contents(directory, directory, lambda: metadata),
        path,
        rank is None,
        lambda error: add_error(report, error, path),
    )
    report.keys += listing.keys
    report.files += len(listing.ends)
    missing = _check_files(directory, listing.ends, report)
    if not report.quick:
        if ends is not None and ends != listing.ends:
            report.damaged.append(Damage(None, index_path, 0, f"the index of {path} says otherwise"))
        check_records(listing, missing, report, progress)
        _check_index(directory, rank, index_path, report)
        check_tables(listing, missing, report)


def _check_index(directory: str, rank: int | None, path: str, report: VerifyReport) -> None:
    try:
        metadata_file.open_index(directory, rank).check()
    except (_C.EngineError, OSError) as error:
        if error.errno != errno.ENOENT:
            report.harmless.append(Damage(None, path, getattr(error, "offset", 0), str(error)))


def _check_files(directory: str, ends: dict[str, int], report: VerifyReport) -> set[str]:
    """Checks that each data file exists and is a regular file. Returns the names of those that are not. Its length is
    checked with `quick` alone: otherwise the records are read."""
    bad = set()
    known: dict[str, int] = {}
    with suppress(OSError):
        known = storage_at(directory).sizes()
    for name, end in ends.items():
        if known.get(name, -1) >= end:
            continue
        path = data_path(directory, name)
        try:
            found = stat_of(path)
        except OSError as error:
            bad.add(name)
            if says_nothing(error.errno, path):
                report.unreadable.append(Damage(None, path, 0, f"data file cannot be looked at: {error}"))
            else:
                report.damaged.append(Damage(None, path, 0, f"data file is missing: {error}"))
            continue
        if not found.is_file:
            bad.add(name)
            report.damaged.append(Damage(None, path, 0, f"{path} is not a regular file"))
        elif found.size < end and report.quick:
            reason = f"file {path} is truncated: it has {found.size} bytes, its last record ends at {end}"
            report.damaged.append(Damage(None, path, found.size, reason))
    return bad


def _verify_safetensors(path: str, report: VerifyReport, progress: Progress | None) -> None:
    def add(error: CheckpointError) -> None:
        add_error(report, error, path)

    try:
        found = SafetensorsContents.read(path, verify=True, on_error=add)
        listing = list_records(of_safetensors(path, found), path, True, add)
    except CheckpointError as error:
        add(error)
        return
    report.keys, report.files = listing.keys, len(found.files)
    if not report.quick:  # a sound header includes a sound length of the file
        check_records(listing, (), report, progress)


def _tell_what_is_unchecked(report: VerifyReport) -> None:
    if report.quick:
        report.unchecked.append("the data: only that there is enough of it")
    elif report.unverified_bytes:
        report.unchecked.append(
            f"{report.unverified_bytes:,} bytes that were written without checksums, or are compressed"
        )
