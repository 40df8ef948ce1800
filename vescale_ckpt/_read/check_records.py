"""Lists the records that a checkpoint's metadata names, and checks every byte of them, for `verify`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from .._checkpoint.native.file_names import DELTA_NAME, checked_location, crc_of
from .._engine import _C
from .._engine.dtypes import DTYPE_CODES, dtype_code
from .._engine.errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.overlap import GROUP_TENSORS, overlap
from .._engine.rows import int_table
from .._storage.open_storage import read_twice, says_nothing, storage_at
from .._storage.paths import check_relative, data_path
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from ..reports import Damage, VerifyReport
from .contents import Contents
from .load import Record
from .non_contiguous_records import wrong_form

Progress = Callable[[int, int], None]  #: takes the bytes done, and those in all
_GROUP_BYTES = 1 << 30  # at most checked between two calls of it, except for larger tensors


@dataclass
class Listing:
    """The records of a checkpoint, without those of which the metadata is malformed."""

    root: str  #: the directory that names of files are relative to
    safetensors: bool
    ends: dict[str, int] = field(default_factory=dict)  #: by file, in the order of their numbers, its least length
    tensors: list[Record] = field(default_factory=list)
    objects: list[Record] = field(default_factory=list)
    transformed: list[Record] = field(default_factory=list)  #: compressed by a stream transform of stock DCP
    keys: int = 0
    wrappers: set[tuple[int, int]] = field(default_factory=set)  #: file and offset of each

    def paths(self) -> list[str]:
        return [data_path(self.root, name) for name in self.ends]


def locations_by_key(
    metadata: Metadata, where: str, on_error: Callable[[CheckpointError], None]
) -> dict[str, dict[tuple[int, ...], Any]]:
    """The record locations that metadata gives, unchecked, by key and offset in the tensor. `on_error` takes the
    errors, one for each location without a key. Raises `CorruptCheckpointError` if there are no locations at all."""
    if not isinstance(metadata.storage_data, dict):
        raise CorruptCheckpointError(f"{where} does not say where anything is stored", key=None, file=where)
    locations: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, info in metadata.storage_data.items():
        if type(index) is MetadataIndex and type(index.fqn) is str:
            locations.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
        else:
            reason = f"the metadata places {index!r}, which is no name"
            on_error(CorruptCheckpointError(reason, key=None, file=where))
    return locations


def list_records(contents: Contents, where: str, whole: bool, on_error: Callable[[CheckpointError], None]) -> Listing:
    """Lists the records that metadata names. Aliases are left out.

    `where`: the metadata's file, for errors. `whole`: also checks that tensors are stored whole. `on_error` takes the
    errors, one for each malformed key.
    """
    metadata = contents.metadata
    locations = locations_by_key(metadata, where, on_error)
    listing = Listing(contents.root, contents.safetensors)
    numbers: dict[str, int] = {}

    def record(key: str, info: Any, dtype: torch.dtype | None, sizes: tuple[int, ...] = ()) -> tuple[Record, bool]:
        """The record, and whether it is transformed."""
        if info is None:
            raise CorruptCheckpointError(f"{key}: the metadata does not say where it is stored", key=key, file=where)
        info = checked_location(info, key)
        name = info.relative_path
        if name not in numbers:
            check_relative(name, key)
        if dtype is not None and math.prod(sizes) * dtype.itemsize >= 1 << 62:
            raise UntrustedCheckpointError(f"{key}: no file holds a chunk of shape {tuple(sizes)}", key=key)
        listing.ends[name] = max(listing.ends.get(name, 0), info.offset + info.length)
        number = numbers.setdefault(name, len(numbers))
        crc, bytes_or_dtype = crc_of(info), torch.uint8 if dtype is None else dtype
        found = Record(key, number, info.offset, info.length, crc, bytes_or_dtype, sizes)
        return found, bool(info.transform_descriptors)

    def add(key: str, stored: Any) -> None:
        of_key = locations.get(key, {})
        if isinstance(stored, BytesStorageMetadata):
            records, plain = [record(key, of_key.get(()), None)], listing.objects
        else:
            assert isinstance(stored, TensorStorageMetadata)  # by metadata_file
            plain, dtype = listing.tensors, stored.properties.dtype
            records = [
                record(key, of_key.get(tuple(chunk.offsets), of_key.get(())), dtype, chunk.sizes)
                for chunk in stored.chunks
            ]
        for found, transformed in records:
            (listing.transformed if transformed else plain).append(found)
        if whole and isinstance(stored, TensorStorageMetadata):
            elements, wanted = sum(math.prod(chunk.sizes) for chunk in stored.chunks), math.prod(stored.size)
            if elements != wanted:  # chunks do not overlap
                reason = f"{key}: {elements} of its {wanted} elements are stored"
                raise CorruptCheckpointError(reason, key=key, file=where)

    for key, stored in metadata.state_dict_metadata.items():
        if key in contents.aliases:
            continue
        listing.keys += 1
        try:
            add(key, stored)
        except CheckpointError as error:
            on_error(error)
    return listing


def check_records(
    listing: Listing, missing: Collection[str], report: VerifyReport, progress: Progress | None = None
) -> None:
    """Reads all records except those in files of `missing`, and adds damage to the report."""
    paths = listing.paths()
    lost = {number for number, name in enumerate(listing.ends) if name in missing}
    archives: list[tuple[Record, bool]] = []  # a record, and whether it is of a tensor
    tensors: list[Record] = []
    for kind in (listing.tensors, listing.objects, listing.transformed):
        for record in kind:
            if record.file in lost:
                reason = "its data file is missing"
                report.damaged.append(Damage(record.key, paths[record.file], record.offset, reason))
                continue
            report.bytes += record.length
            if kind is listing.transformed:
                report.unverified_bytes += record.length
            elif kind is listing.tensors and record.dtype in DTYPE_CODES:
                tensors.append(record)
            else:
                archives.append((record, kind is listing.tensors))
    storage = storage_at(listing.root)
    options = engine_options(None, direct_io_setting("auto"), requests=storage.by_requests)
    reads = _C.SafetensorsReads(True, options) if listing.safetensors else None

    def check(
        group: tuple[list[Record], array[int]],
    ) -> tuple[list[tuple[int, int, str, int]], list[int], int] | CheckpointError:
        records, table = group
        try:
            where = listing.root if reads is None else paths[records[0].file]
            with named_errors(lambda row: records[row].key, where):
                if reads is None:
                    return _C.check_tensors(paths, table, options)
                return reads.check_tensors(paths, table)
        except CheckpointError as error:  # a file cannot be read, or was replaced since its records were listed
            return error

    done, total = 0, sum(record.length for record in tensors)
    again: list[Record] | None = [] if storage.rereads else None  # that seem to be damaged; None: that is told
    while tensors:
        for (group, _), found in overlap(_groups(tensors, by_file=listing.safetensors), check):
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
                if says_nothing(number, path):
                    report.unreadable.append(Damage(record.key, path, offset, reason))
                elif again is not None and not number:
                    again.append(record)
                else:
                    report.damaged.append(Damage(record.key, path, offset, reason))
            archives += [(group[row], True) for row in not_plain]
        tensors, again = again or [], None
        if tensors:
            storage.look_again()
            reads = _C.SafetensorsReads(True, options) if listing.safetensors else None
    for record, of_tensor in archives:
        if _check_archive(record, paths[record.file], of_tensor, report):
            listing.wrappers.add((record.file, record.offset))


def _groups(records: list[Record], *, by_file: bool) -> Iterator[tuple[list[Record], array[int]]]:
    """Tensors that are checked together, and their rows in the engine's table."""
    # In the order of the files, so that neighbouring records are read together.
    records = sorted(records, key=lambda record: (record.file, record.offset))
    for _, of_file in groupby(records, lambda record: record.file if by_file else 0):
        group: list[Record] = []
        table, held = int_table(), 0
        for record in of_file:
            if group and (len(group) == GROUP_TENSORS or held + record.length > _GROUP_BYTES):
                yield group, table
                group, table, held = [], int_table(), 0
            code = dtype_code(record.dtype, record.key)
            table.extend((record.file, record.offset, record.length, record.crc, code))
            table.extend((len(record.sizes), *record.sizes))
            group.append(record)
            held += record.length
        yield group, table


def _check_archive(record: Record, path: str, of_tensor: bool, report: VerifyReport) -> bool:
    """Checks the record of an object, of a tensor that is not contiguous (a transposed one, say), or of a wrapper
    subclass. Returns whether it is a wrapper, of which the CRC-32 is that of its archive: its class, which may not be
    known here, is not needed."""

    def check() -> tuple[bool, int, str]:
        plain, is_wrapper = of_tensor, False
        found = _C.check_archive_at(path, record.offset, record.length, record.crc)
        if of_tensor and record.crc >= 0:
            is_wrapper = not found[0]
            plain = not is_wrapper
            if plain:  # the CRC-32 is of the elements
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
        kind = report.unreadable if says_nothing(error.errno, path) else report.damaged
        kind.append(Damage(record.key, path, record.offset, str(error)))
        return False
    report.unverified_bytes += unverified
    if (
        not harmless and of_tensor and not is_wrapper and record.crc >= 0
    ):  # this package writes all records with a CRC-32 in one form
        harmless = "what is around its values is not as it was written"
    if harmless:
        report.harmless.append(Damage(record.key, path, record.offset, f"{record.key}: {harmless}"))
    return is_wrapper


def check_tables(listing: Listing, missing: Collection[str], report: VerifyReport) -> None:
    """Checks the tables of block checksums at the end of data files of this package. Damage of one is harmless: without
    it a load of a part of a tensor reads and verifies all of its record."""
    names = list(listing.ends)
    # The files of a delta save, and those that it names, may hold records that only older metadata names.
    storage = storage_at(listing.root)
    may_hold_others = storage.has(DELTA_NAME)
    crcs: dict[str, dict[int, int]] = {}
    for record in listing.tensors:
        is_wrapper = (record.file, record.offset) in listing.wrappers  # it is read whole, as objects are
        if record.crc >= 0 and names[record.file] not in missing and not is_wrapper:
            crcs.setdefault(names[record.file], {})[record.offset] = record.crc
    for name, expected in crcs.items():
        path = data_path(listing.root, name)
        try:
            rows, offset = _C.checksum_table(path)
            if rows is None and storage.rereads:
                storage.look_again()
                rows, offset = _C.checksum_table(path)
        except _C.EngineError as error:
            report.harmless.append(Damage(None, path, error.offset, str(error)))
            continue
        if rows is None:
            reason = f"{path} does not end in a sound table of checksums: it is damaged, or was cut off"
            report.harmless.append(Damage(None, path, offset, reason))
        elif not expected.items() <= dict(rows).items() or not (may_hold_others or len(rows) == len(expected)):
            reason = f"the table of checksums of {path} is of other records than the metadata"
            report.harmless.append(Damage(None, path, offset, reason))


def add_error(report: VerifyReport, error: CheckpointError, file: str) -> None:
    """Adds an error to a report: as damage, or as unreadable if it leaves open what is there."""
    unreadable = says_nothing(getattr(error, "errno", None), getattr(error, "path", file))
    (report.unreadable if unreadable else report.damaged).append(as_damage(error, file))


def as_damage(error: CheckpointError, file: str) -> Damage:
    """An error as an entry of a report."""
    return Damage(getattr(error, "key", None), getattr(error, "file", file), getattr(error, "offset", 0), str(error))
