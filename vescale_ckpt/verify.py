"""`verify`: whether a checkpoint is whole, without loading it anywhere."""

from __future__ import annotations

import errno
import math
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from . import _C, engine, metadata_file, safetensors_checkpoint, settings
from ._native.names import check_relative, checked_place, crc_of, index_name, metadata_name
from ._storage.directory import directory_at, local_path, stat_of
from .arguments import checked_flag, checked_path
from .errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from .no_checkpoint import explained
from .odd_record import wrong_form
from .overlap import GROUP_TENSORS, overlap
from .safetensors_checkpoint import Box, Contents


class Damage(NamedTuple):
    """One thing that is wrong. Where it is among `VerifyReport.damaged`, a load of `key` raises."""

    key: str | None  #: name of the tensor or object; None: it concerns all of the file
    file: str
    offset: int  #: bytes from the start of the file
    reason: str


@dataclass
class VerifyReport:
    """What `verify` found."""

    path: str
    quick: bool
    damaged: list[Damage] = field(default_factory=list)
    keys: int = 0  #: tensors and objects that the metadata names
    files: int = 0  #: data files that it names, or safetensors files
    bytes: int = 0  #: of records that were read
    unverified_bytes: int = 0  #: of these, written without checksums or in a form that nothing here can check
    #: what is damaged, though every load gives what was saved: loads do without the index, the tables of checksums of
    #: blocks and what a record repeats. Not looked for with `quick`.
    harmless: list[Damage] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  #: what has nothing that it could be checked against, in words
    indexed: bool = False  #: an index that belongs to the metadata lies beside it; without one loads begin slower

    @property
    def ok(self) -> bool:
        """Whether loads give what was saved, as far as that can be checked."""
        return not self.damaged


def verify(path: str | os.PathLike[str], *, quick: bool = False) -> VerifyReport:
    """Checks the checkpoint in the directory `path`, in this process alone, however many ranks have saved it.

    With `quick`, that the metadata is sound, and that each data file it names is a regular file, long enough for what
    it is said to hold: the cost is one small file and one `stat` a data file. Otherwise also every byte of every tensor
    and object, against its checksums; the index, the tables of checksums and the data descriptors, of which damage is
    listed as harmless; and `unchecked` tells what there is no checksum of. Of data no more than
    `VESCALE_CKPT_ARENA_BYTES` is in memory at a time.

    Damage is not raised but listed, all of it; so is what cannot be read, and a directory without a checkpoint. A
    checkpoint of stock DCP is verified as far as it has checksums: `unverified_bytes` counts the rest. So are
    safetensors files, one or a directory of them; of those `quick` checks headers, which say how long their files are.

    Raises ValueError for a URL that is no `file://`.
    """
    checked_flag("quick", quick)
    settings.check()
    directory = local_path(checked_path("path", path))
    report = VerifyReport(directory, quick)
    if safetensors_checkpoint.is_one(directory):
        _verify_safetensors(directory, report)
        _tell_what_is_unchecked(report)
        return report
    try:
        ranks = metadata_file.metadata_ranks(directory) or [None]
    except OSError:
        ranks = [None]
    for rank in ranks:
        lock = directory_at(directory).share(metadata_name(rank))
        try:
            with explained(directory):
                _verify_metadata_file(directory, rank, report)
        except CheckpointError as error:
            report.damaged.append(_damage(error, os.path.join(directory, metadata_name(rank))))
        finally:
            if lock is not None:
                lock.release()
    _tell_what_is_unchecked(report)
    return report


def _verify_metadata_file(directory: str, rank: int | None, report: VerifyReport) -> None:
    ends = _ends_by_index(directory, rank, report)
    if report.quick and ends is not None:
        report.files += len(ends)
        _check_files(directory, ends, report)
        return
    data = metadata_file.metadata_bytes(directory, rank)
    path, index_path = (os.path.join(directory, name(rank)) for name in (metadata_name, index_name))
    if not metadata_file.has_checksum(data):
        report.unchecked.append(f"{path} has no checksum: that it makes sense is all that is known")
    contents = _Contents(directory, metadata_file.loads(data, path), rank, report)
    bad_files = _check_files(directory, contents.ends, report)
    if not report.quick:
        if ends is not None and ends != contents.ends:
            report.damaged.append(Damage(None, index_path, 0, f"the index of {path} says otherwise"))
        _check_records(directory, contents, bad_files, report)
        _check_index(index_path, report)
        _check_tables(directory, contents, bad_files, report)


def _ends_by_index(directory: str, rank: int | None, report: VerifyReport) -> dict[str, int] | None:
    """How long each data file is at least, if that can be had without building the metadata, which is then checked."""
    index = metadata_file.read_index(directory, rank)
    if index is None:
        return None
    path = os.path.join(directory, metadata_name(rank))
    data = metadata_file.metadata_bytes(directory, rank)
    metadata_file.check(data, path)  # against its checksum, which the index repeats
    try:
        files, ends = index.files, index.file_ends()
    except _C.EngineError:  # a damaged index harms nobody: the metadata rules
        return None
    report.indexed = True
    if report.quick:
        report.keys += len(index)
    return {check_relative(name, directory): end for name, end in zip(files, ends, strict=True)}


def _check_index(path: str, report: VerifyReport) -> None:
    try:
        _C.Index.open(path).check()
    except _C.EngineError as error:
        if error.errno != errno.ENOENT:
            report.harmless.append(Damage(None, path, error.offset, str(error)))


def _check_tables(directory: str, contents: _Contents, bad_files: set[str], report: VerifyReport) -> None:
    """The checksums of blocks that files with records of ours end in. Without them parts of tensors are verified by
    reading all of it."""
    crcs: dict[str, dict[int, int]] = {}
    for record in contents.tensors:
        if record.crc >= 0 and not record.transformed and record.file not in bad_files:
            crcs.setdefault(record.file, {})[record.offset] = record.crc
    for name, expected in crcs.items():
        path = os.path.join(directory, name)
        try:
            rows, offset = _C.checksum_table(path)
        except _C.EngineError as error:
            report.harmless.append(Damage(None, path, error.offset, str(error)))
            continue
        if rows is None:
            reason = f"{path} does not end in a sound table of checksums: it is damaged, or was cut off"
            report.harmless.append(Damage(None, path, offset, reason))
        elif dict(rows) != expected:
            reason = f"the table of checksums of {path} is of other records than the metadata"
            report.harmless.append(Damage(None, path, offset, reason))


def _check_files(directory: str, ends: dict[str, int], report: VerifyReport) -> set[str]:
    """Looks at each data file. Returns those that are not there; records that do not fit are left to who reads them."""
    bad = set()
    for name, end in ends.items():
        path = os.path.join(directory, name)
        try:
            found = stat_of(path)
        except OSError as error:
            bad.add(name)
            report.damaged.append(Damage(None, path, 0, f"data file is missing: {error}"))
            continue
        if not found.is_file:
            bad.add(name)
            report.damaged.append(Damage(None, path, 0, f"{path} is not a regular file"))
        elif found.size < end and report.quick:
            reason = f"file {path} is truncated: it has {found.size} bytes, its last record ends at {end}"
            report.damaged.append(Damage(None, path, found.size, reason))
    return bad


@dataclass(slots=True)
class _Record:
    key: str
    file: str  #: as the metadata names it
    offset: int
    length: int
    crc: int  #: CRC-32 of a tensor's bytes or of all of an object's record, -1 if the metadata has none
    transformed: bool
    dtype: torch.dtype | None = None  #: None: an object
    sizes: tuple[int, ...] = ()


class _Contents:
    """What the metadata says there is, as far as it makes sense. What does not is added to the report."""

    def __init__(self, directory: str, metadata: Metadata, rank: int | None, report: VerifyReport) -> None:
        self.path = os.path.join(directory, metadata_name(rank))
        self.ends: dict[str, int] = {}
        self.tensors: list[_Record] = []
        self.objects: list[_Record] = []
        if not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpointError(f"{self.path} does not say where anything is stored", key=None, file=self.path)
        places = self._places(metadata.storage_data, report)
        for key, stored in metadata.state_dict_metadata.items():
            try:
                self._add(key, stored, places.pop(key, {}), whole=rank is None)
            except CheckpointError as error:
                report.damaged.append(_damage(error, self.path, key))
        report.keys += len(metadata.state_dict_metadata)
        report.files += len(self.ends)

    def _places(self, storage: dict[Any, Any], report: VerifyReport) -> dict[str, dict[tuple[int, ...], Any]]:
        places: dict[str, dict[tuple[int, ...], Any]] = {}
        for index, info in storage.items():
            if type(index) is not MetadataIndex or type(index.fqn) is not str:
                report.damaged.append(Damage(None, self.path, 0, f"the metadata places {index!r}, which is no name"))
                continue
            places.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
        return places

    def _add(self, key: str, stored: Any, places: dict[tuple[int, ...], Any], *, whole: bool) -> None:
        if isinstance(stored, BytesStorageMetadata):
            self.objects.append(self._record(key, places.get(())))
            return
        assert isinstance(stored, TensorStorageMetadata)  # by metadata_file
        records = [
            self._record(key, places.get(tuple(chunk.offsets), places.get(())), stored.properties.dtype, chunk.sizes)
            for chunk in stored.chunks
        ]
        elements = sum(math.prod(chunk.sizes) for chunk in stored.chunks)  # they do not overlap
        if whole and elements != math.prod(stored.size):
            raise CorruptCheckpointError(
                f"{key}: {elements} of its {math.prod(stored.size)} elements are stored", key=key, file=self.path
            )
        self.tensors += records

    def _record(self, key: str, info: Any, dtype: torch.dtype | None = None, sizes: tuple[int, ...] = ()) -> _Record:
        if info is None:
            raise CorruptCheckpointError(
                f"{key}: the metadata does not say where it is stored", key=key, file=self.path
            )
        place = checked_place(info, key)
        name, offset, length = check_relative(place.relative_path, key), place.offset, place.length
        if dtype is not None and math.prod(sizes) * dtype.itemsize >= 1 << 62:
            raise UntrustedCheckpointError(f"{key}: no file holds a chunk of shape {tuple(sizes)}", key=key)
        self.ends[name] = max(self.ends.get(name, 0), offset + length)
        transformed = bool(place.transform_descriptors)
        return _Record(key, name, offset, length, crc_of(place), transformed, dtype, sizes)


# --- Reading all of it


def _check_records(directory: str, contents: _Contents, bad_files: set[str], report: VerifyReport) -> None:
    def readable(record: _Record) -> bool:
        if record.file not in bad_files:
            return True
        _add(report, directory, record, record.offset, "its data file is missing")
        return False

    archives = []
    tensors = []
    for record in filter(readable, contents.tensors + contents.objects):
        report.bytes += record.length
        if record.transformed:  # compressed by a stream transform of stock DCP
            report.unverified_bytes += record.length
        elif record.dtype in engine.DTYPE_CODES:
            tensors.append(record)
        else:
            archives.append(record)
    options = engine.options(None, engine.direct_io_setting("auto"))
    names = list(contents.ends)
    numbers = {name: number for number, name in enumerate(names)}
    paths = [os.path.join(directory, name) for name in names]

    def check(group: _Group) -> tuple[list[tuple[int, int, str]], list[int], int]:
        with engine.named_errors(lambda row: group.records[row].key, directory):
            return _C.check_tensors(paths, group.table, options)

    for group, (damaged, unread, unverified) in overlap(_groups(tensors, numbers), check):
        report.unverified_bytes += unverified
        for row, offset, reason in damaged:
            _add(report, directory, group.records[row], offset, reason)
        archives += [group.records[row] for row in unread]
    for record in archives:
        _check_archive(directory, record, report)


@dataclass
class _Group:
    """Tensors that are checked together, and their rows in the engine's table."""

    records: list[_Record] = field(default_factory=list)
    table: array[int] = field(default_factory=engine.int_table)


def _groups(records: list[_Record], numbers: dict[str, int]) -> Iterator[_Group]:
    # In the order of the files: neighbours are read in one go.
    records = sorted(records, key=lambda record: (numbers[record.file], record.offset))
    for first in range(0, len(records), GROUP_TENSORS):
        group = _Group(records[first : first + GROUP_TENSORS])
        for record in group.records:
            assert record.dtype is not None
            code = engine.dtype_code(record.dtype, record.key)
            group.table.extend((numbers[record.file], record.offset, record.length, record.crc, code))
            group.table.extend((len(record.sizes), *record.sizes))
        yield group


def _check_archive(directory: str, record: _Record, report: VerifyReport) -> None:
    """An object, or a tensor whose record is not what torch writes for a plain one (of a transposed one, say)."""
    path = os.path.join(directory, record.file)
    crc = record.crc if record.dtype is None else -1  # of a tensor it is of the plain bytes
    try:
        wrong, offset, unverified, harmless = _C.check_archive_at(path, record.offset, record.length, crc)
        if not wrong and record.dtype is not None:
            wrong = wrong_form(path, record.offset, record.length, record.dtype, record.sizes, record.crc)
    except (_C.EngineError, OSError) as error:
        wrong, offset, unverified, harmless = str(error), record.offset, 0, ""
    report.unverified_bytes += unverified
    if wrong:
        _add(report, directory, record, offset, wrong)
        return
    if not harmless and record.dtype is not None and record.crc >= 0:  # ours are all written in one way
        harmless = "what is around its values is not as it was written"
    if harmless:
        report.harmless.append(Damage(record.key, path, record.offset, f"{record.key}: {harmless}"))


# --- Safetensors files


def _verify_safetensors(path: str, report: VerifyReport) -> None:
    def add(error: CheckpointError) -> None:
        report.damaged.append(_damage(error, path))

    try:
        contents = Contents.read(path, verify=True, on_error=add)
    except CheckpointError as error:
        add(error)
        return
    boxes = [box for box in contents.boxes() if box.name not in contents.aliases]
    stored: dict[str, int] = {}
    for box in boxes:
        stored[box.name] = stored.get(box.name, 0) + math.prod(box.size)  # they do not overlap
    for name, shape in {box.name: box.shape for box in boxes}.items():
        if stored[name] != math.prod(shape):
            reason = f"{name}: {stored[name]} of its {math.prod(shape)} elements are stored"
            report.damaged.append(Damage(name, path, 0, reason))
    report.keys, report.files = len(stored), len(contents.files)
    if report.quick:
        return
    report.bytes = sum(box.bytes for box in boxes)
    reads = _C.SafetensorsReads(True, engine.options(None, engine.direct_io_setting("auto")))
    paths = [os.path.join(contents.root, name) for name in contents.files]
    boxes.sort(key=lambda box: (box.file, box.at))
    for number, of_file in groupby(boxes, lambda box: box.file):
        of = list(of_file)
        for first in range(0, len(of), GROUP_TENSORS):
            group = of[first : first + GROUP_TENSORS]
            try:
                damaged, unverified = _checked(reads, group, paths)
            except CheckpointError as error:  # it is another file than a moment ago
                add(error)
                continue
            report.unverified_bytes += unverified
            report.damaged += [Damage(key, paths[number], offset, reason) for key, offset, reason in damaged]


def _checked(reads: _C.SafetensorsReads, boxes: list[Box], paths: list[str]) -> tuple[list[tuple[str, int, str]], int]:
    """Key, offset and reason of what is damaged; bytes that cannot be verified."""
    table = engine.int_table()
    for box in boxes:
        table.extend((box.file, box.at, box.bytes, box.crc, box.code, len(box.size), *box.size))
    with engine.named_errors(lambda row: boxes[row].name, paths[boxes[0].file]):
        damaged, _, unverified = reads.check_tensors(paths, table)
    return [(boxes[row].name, offset, reason) for row, offset, reason in damaged], unverified


# --- Telling


def _tell_what_is_unchecked(report: VerifyReport) -> None:
    if report.quick:
        report.unchecked.append("the data: only that there is enough of it")
    elif report.unverified_bytes:
        report.unchecked.append(
            f"{report.unverified_bytes:,} bytes that were written without checksums, or are compressed"
        )


def _add(report: VerifyReport, directory: str, record: _Record, offset: int, reason: str) -> None:
    report.damaged.append(Damage(record.key, os.path.join(directory, record.file), offset, reason))


def _damage(error: CheckpointError, file: str, key: str | None = None) -> Damage:
    """An error in the words of a report."""
    return Damage(getattr(error, "key", key), getattr(error, "file", file), getattr(error, "offset", 0), str(error))
