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


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class JobStats:
    """The work of all ranks of a save or load. The same on all ranks."""

    ranks: int
    bytes: int  #: bytes of tensor data, of all ranks
    most_bytes: int  #: bytes of the rank that moved most
    slowest_rank: int  #: the rank with most seconds of its own work
    slowest_seconds: float  #: seconds of the slowest rank
    mean_seconds: float  #: mean over all ranks
    last_rank: int = 0  #: the rank that came last to the first exchange
    late_seconds: float = 0.0  #: seconds from the first rank's arrival to the last rank's
    last_phase: str = ""  #: the phase that took the last rank longest before it came; "": none did
    last_phase_seconds: float = 0.0  #: seconds of that phase, to a tenth

    @property
    def imbalance(self) -> float:
        """The rank with most bytes exceeds the mean by this share of the mean. 0: all ranks have equally many."""
        return self.most_bytes * self.ranks / self.bytes - 1 if self.bytes else 0.0


@dataclass(frozen=True)
class TransferStats:
    """One rank's part of a save or load. Seconds are wall time."""

    seconds: float  #: seconds in write_data / read_data
    tensors: int
    objects: int
    bytes: int  #: bytes of tensor data
    in_place_bytes: int  #: bytes that moved between the file and the tensors' own memory, or their snapshot
    slot_bytes: int  #: bytes that moved through the arena's slots, or came from an object store
    direct_bytes: int  #: bytes that bypassed the page cache
    uncached_bytes: int  #: bytes that went through the page cache and were dropped from it at once
    buffered_bytes: int  #: bytes that went through the page cache
    io_path: str  #: the last five fields in words
    total_seconds: float = field(default=0.0, kw_only=True)  #: seconds from the call until it is durable, or loaded
    #: seconds until the call returned; in asynchronous saves less than `total_seconds`
    blocked_seconds: float = field(default=0.0, kw_only=True)
    #: seconds by phase: previous save, plan, snapshot, compare (with a base), write, sync, commit; metadata, plan,
    #: read, hand over; wait (for other ranks)
    phases: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    job: JobStats | None = field(default=None, kw_only=True)  #: None if DCP's collectives do not give it


@dataclass(frozen=True)
class SaveStats(TransferStats):
    """The statistics of one rank's writes."""

    file_bytes: int  #: length of the files that the rank wrote
    plan_reused: bool | None = field(default=None, kw_only=True)  #: whether the plan of an earlier save was used again
    #: texts about what devices of this process have refused so far; the log has each once. Copies from them are slower
    device_notes: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class LoadStats(TransferStats):
    """The statistics of one rank's reads."""

    verified: bool
    unverified_bytes: int  #: bytes of records that were written without checksums
    fallback_tensors: int  #: tensors that torch.load read, because their records are not plain contiguous tensors
    shared_bytes: int = 0  #: the part of `bytes` that several ranks need and only one rank read

    @property
    def read_bytes(self) -> int:
        """The bytes that were read from the data files, without objects: `bytes`, the bytes between them, their
        framing, and the rest of blocks with one checksum."""
        return self.direct_bytes + self.uncached_bytes + self.buffered_bytes


@dataclass(frozen=True)
class LoadReport:
    """The differences between a state and a checkpoint, by the checkpoint's keys, and the statistics of the load.

    The lists are the same on all ranks. `stats` are those of this rank.
    """

    missing: list[str]  #: keys in the state of a rank that the checkpoint lacks
    unexpected: list[str]  #: selected keys in the checkpoint that no rank's state has
    mismatched: list[Mismatch]  #: keys with another shape, dtype or kind in the checkpoint than in the state
    stats: LoadStats


class Damage(NamedTuple):
    """One place that is damaged, or that could not be read. If it is in `VerifyReport.damaged`, a load of `key`
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
    unverified_bytes: int = 0  #: bytes of them that have no checksums or a form that this package cannot check
    #: damage that no load notices: in the index, in the tables of block checksums, and in repeated parts of records.
    #: Loads still give exactly what was saved. `quick` does not check it.
    harmless: list[Damage] = field(default_factory=list)
    #: places that could not be read, because the storage refused or did not answer. They may be sound or damaged. Try
    #: again when the storage answers.
    unreadable: list[Damage] = field(default_factory=list)
    #: what loads refuse with `UntrustedCheckpointError`: foreign classes in `.metadata`, paths to other places. It
    #: is no damage, and other software may load it.
    refused: list[Damage] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  #: texts that name data without a checksum or a second copy
    indexed: bool = False  #: whether an index belongs to the metadata; without one, loads start slower

    @property
    def ok(self) -> bool:
        """Whether loads give exactly what was saved, as far as that can be checked. False if something is damaged,
        refused or unreadable."""
        return not (self.damaged or self.refused or self.unreadable)

    @property
    def reason(self) -> str:
        """The first damage, or else the first place that is refused or could not be read. Empty if the checkpoint is
        ok."""
        return next((found.reason for found in (*self.damaged, *self.refused, *self.unreadable)), "")


@dataclass(frozen=True)
class SavedBy:
    """When a checkpoint was saved, by how many ranks and with which versions."""

    time: str  #: as ISO 8601 has it, in UTC
    ranks: int
    torch: str
    vescale_ckpt: str


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor and its place in a file."""

    offsets: tuple[int, ...]  #: the first element in the tensor
    sizes: tuple[int, ...]
    file: str  #: name relative to the checkpoint
    offset: int  #: position of the record in the file
    bytes: int  #: length of the record, framing included


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str  #: torch's name of it, without "torch."
    bytes: int  #: bytes of its elements
    chunks: list[StoredChunk]

    @property
    def whole(self) -> bool:
        """Whether its chunks hold all elements. Chunks do not overlap."""
        return sum(math.prod(chunk.sizes) for chunk in self.chunks) == math.prod(self.shape)


@dataclass(frozen=True)
class StoredObject:
    """A value that is no tensor."""

    file: str
    offset: int  #: -1: unknown, as `bytes`
    bytes: int  #: -1: it has no record of its own (torch.save pickles objects together)
    #: what it is, if that is a number, a text, None or a short list or mapping of these; else None
    value: Any = None


EXTRA_FILES = "__extra_files__."  #: keys of a save's `extra_files=` begin with this


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a checkpoint by its metadata or headers alone. `inspect` returns it."""

    path: str
    format: str  #: "dcp", "safetensors" or "torch"
    writer: str  #: the software that wrote it; empty if its files do not say that
    save_id: str  #: the id of the save; empty if the format has none
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    aliases: dict[str, str]  #: {other name: name of a stored tensor}
    files: dict[str, int]  #: {data file: length, or -1 if it is missing}
    is_node_part: bool = False  #: whether it is in the folder of one machine: others may have what is missing
    saved_by: SavedBy | None = None  #: None: not recorded, as by older versions and other software

    @property
    def bytes(self) -> int:
        """The bytes of all tensors' elements."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def extra_files(self) -> list[str]:
        """The names of the files that were saved with `extra_files=`."""
        return [key.removeprefix(EXTRA_FILES) for key in self.objects if key.startswith(EXTRA_FILES)]

    @property
    def file_bytes(self) -> int:
        """The bytes of all data files that exist."""
        return sum(length for length in self.files.values() if length > 0)
