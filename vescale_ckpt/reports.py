"""Defines the reports that saves, loads, `verify` and `inspect` return to users."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import Mismatch

__all__ = [
    "CheckpointInfo",
    "Damage",
    "JobStats",
    "LoadReport",
    "LoadStats",
    "SaveStats",
    "SavedBy",
    "StoredChunk",
    "StoredObject",
    "StoredTensor",
    "TransferStats",
    "VerifyReport",
]


@dataclass(frozen=True)
class JobStats:
    """Statistics of a save or load over all ranks. Equal on all ranks."""

    ranks: int
    bytes: int  #: bytes of tensor data, summed over all ranks
    most_bytes: int  #: bytes of the rank that moved the most
    slowest_rank: int  #: the rank that spent the most time on its own work, without waits for other ranks
    slowest_seconds: float  #: seconds of its own work of the slowest rank
    mean_seconds: float  #: the same, averaged over all ranks
    last_rank: int = 0  #: the last rank to arrive at the first exchange
    late_seconds: float = 0.0  #: seconds from the first rank's arrival to the last rank's

    @property
    def imbalance(self) -> float:
        """How far the rank with the most bytes exceeds the mean, as a fraction of the mean. 0: all ranks are equal."""
        return self.most_bytes * self.ranks / self.bytes - 1 if self.bytes else 0.0


@dataclass(frozen=True)
class TransferStats:
    """Statistics of one rank's part of a save or load. Seconds are wall-clock time."""

    seconds: float  #: seconds in write_data / read_data
    tensors: int
    objects: int
    bytes: int  #: bytes of tensor data
    in_place_bytes: int  #: bytes transferred directly between the file and the tensors' memory or their snapshot
    slot_bytes: int  #: bytes transferred through the engine's slots, or from an object store
    direct_bytes: int  #: bytes that bypassed the page cache
    buffered_bytes: int  #: bytes that went through the page cache
    io_path: str  #: the last four fields as text
    total_seconds: float = field(default=0.0, kw_only=True)  #: seconds from the call until all is durable, or loaded
    #: seconds until the call returned; for asynchronous saves, less than `total_seconds`
    blocked_seconds: float = field(default=0.0, kw_only=True)
    #: seconds by phase: previous save, plan, snapshot, write, sync, commit; metadata, plan, read, hand over;
    #: wait (for other ranks)
    phases: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    job: JobStats | None = field(default=None, kw_only=True)  #: None under DCP's own collectives


@dataclass(frozen=True)
class SaveStats(TransferStats):
    """Statistics of one rank's part of a save."""

    file_bytes: int  #: total length of the files that the rank wrote
    plan_reused: bool | None = field(default=None, kw_only=True)  #: whether the plan of an earlier save was reused
    #: notes on operations that this process's devices have refused so far, each logged once; their copies are slower
    device_notes: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class LoadStats(TransferStats):
    """Statistics of one rank's part of a load."""

    verified: bool
    unverified_bytes: int  #: bytes of records that have no checksums
    fallback_tensors: int  #: tensors read by torch.load, because their records are not plain contiguous tensors
    shared_bytes: int = 0  #: the part of `bytes` that several ranks need and only one rank has read

    @property
    def read_bytes(self) -> int:
        """Bytes read from the data files, without objects: `bytes`, the bytes between them, their framing, and the
        remainder of checksummed blocks."""
        return self.direct_bytes + self.buffered_bytes


@dataclass(frozen=True)
class LoadReport:
    """The differences between a state and a checkpoint, by the checkpoint's keys, and the statistics of the load.

    The lists are the same on all ranks. `stats` are those of this rank.
    """

    missing: list[str]  #: keys of any rank's state that the checkpoint lacks
    unexpected: list[str]  #: selected keys of the checkpoint that no rank's state has
    mismatched: list[Mismatch]  #: keys whose shape, dtype or kind differs between checkpoint and state
    stats: LoadStats


class Damage(NamedTuple):
    """A location that is damaged or could not be read. If it is listed in `VerifyReport.damaged`, a load of `key`
    raises."""

    key: str | None  #: name of the tensor or object; None: the damage concerns the whole file
    file: str
    offset: int  #: bytes from the start of the file
    reason: str


@dataclass
class VerifyReport:
    """The result of `verify`."""

    path: str
    quick: bool
    damaged: list[Damage] = field(default_factory=list)
    keys: int = 0  #: number of tensors and objects that the metadata names
    files: int = 0  #: number of data files that the metadata names, or of safetensors files
    bytes: int = 0  #: bytes of records that were read
    unverified_bytes: int = 0  #: the part of `bytes` without checksums, or in a form that this package cannot verify
    #: damage that no load notices: in the index, in the tables of block checksums, and in redundant parts of records.
    #: Loads still return exactly what was saved. Not checked with `quick`.
    harmless: list[Damage] = field(default_factory=list)
    #: locations that could not be read, because the storage refused or did not answer. They may be sound or damaged.
    #: Retry when the storage answers.
    unreadable: list[Damage] = field(default_factory=list)
    #: what loads refuse with `UntrustedCheckpointError`: foreign classes in `.metadata`, paths outside the directory.
    #: Not damage; other software may load it.
    refused: list[Damage] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  #: descriptions of data without a checksum or a second copy
    indexed: bool = False  #: whether the metadata has a valid index; without one, loads start more slowly

    @property
    def ok(self) -> bool:
        """Whether loads return exactly what was saved, as far as that can be verified. False if anything is damaged,
        refused or unreadable."""
        return not (self.damaged or self.refused or self.unreadable)

    @property
    def reason(self) -> str:
        """The reason of the first entry of `damaged`, otherwise of `refused`, otherwise of `unreadable`. Empty if the
        checkpoint is ok."""
        return next((found.reason for found in (*self.damaged, *self.refused, *self.unreadable)), "")


@dataclass(frozen=True)
class SavedBy:
    """When a checkpoint was saved, by how many ranks and with which versions."""

    time: str  #: in ISO 8601 format, UTC
    ranks: int
    torch: str
    vescale_ckpt: str


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor and its location in a file."""

    offsets: tuple[int, ...]  #: index of the chunk's first element in the tensor
    sizes: tuple[int, ...]
    file: str  #: path relative to the checkpoint
    offset: int  #: position of the record in the file
    bytes: int  #: length of the record, framing included


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str  #: torch's name, without "torch."
    bytes: int  #: total bytes of its elements
    chunks: list[StoredChunk]

    @property
    def whole(self) -> bool:
        """Whether the chunks contain all elements. Chunks do not overlap."""
        return sum(math.prod(chunk.sizes) for chunk in self.chunks) == math.prod(self.shape)


@dataclass(frozen=True)
class StoredObject:
    """A value that is not a tensor."""

    file: str
    offset: int  #: position of the record in the file; -1: unknown
    bytes: int  #: length of the record; -1: no record of its own (torch.save pickles objects together)
    #: the value, if it is a number, a string, None, or a short list or mapping of these; otherwise None
    value: Any = None


EXTRA_FILES = "__extra_files__."  #: prefix of the keys of a save's `extra_files=`


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a checkpoint according to its metadata or headers. Returned by `inspect`."""

    path: str
    format: str  #: "dcp", "safetensors" or "torch"
    writer: str  #: the software that wrote it; empty if its files do not record that
    save_id: str  #: the id of the save; empty if the format has none
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    aliases: dict[str, str]  #: {other name: name of a stored tensor}
    files: dict[str, int]  #: {data file: length, or -1 if it is missing}
    is_node_part: bool = False  #: whether it is one machine's folder; other machines may have the missing files
    saved_by: SavedBy | None = None  #: None: not recorded (older versions, other software)
    fingerprint: str | None = None  #: of the saved state, in 32 hexadecimal digits; None: not kept, or damaged

    @property
    def bytes(self) -> int:
        """Total bytes of all tensors' elements."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def extra_files(self) -> list[str]:
        """Names of the files that were saved with `extra_files=`."""
        return [key.removeprefix(EXTRA_FILES) for key in self.objects if key.startswith(EXTRA_FILES)]

    @property
    def file_bytes(self) -> int:
        """Total bytes of all existing data files."""
        return sum(length for length in self.files.values() if length > 0)
