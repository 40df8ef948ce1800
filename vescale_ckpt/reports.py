"""The reports that saves, loads and `verify` return: times, bytes, differences between state and checkpoint, damage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import Mismatch


@dataclass(frozen=True)
class JobStats:
    """What all ranks of a save or load did. The same on all ranks."""

    ranks: int
    bytes: int  #: of tensor data, of all ranks
    most_bytes: int  #: of one rank
    slowest_rank: int  #: the rank with the most seconds of work of its own
    slowest_seconds: float  #: of that rank
    mean_seconds: float  #: of all ranks
    last_rank: int = 0  #: the rank that came last to the first exchange
    late_seconds: float = 0.0  #: by which it came later than the first one

    @property
    def imbalance(self) -> float:
        """By which share of the mean the rank with the most bytes exceeds the mean. 0: all have equally many."""
        return self.most_bytes * self.ranks / self.bytes - 1 if self.bytes else 0.0


@dataclass(frozen=True)
class TransferStats:
    """One rank's part of a save or load. Seconds of wall time, bytes."""

    seconds: float  #: in write_data / read_data
    tensors: int
    objects: int
    bytes: int  #: of tensor data
    in_place_bytes: int  #: moved between the tensors' own memory and the file, without a copy
    slot_bytes: int  #: moved through the arena's slots, or read from an object store
    direct_bytes: int  #: past the page cache
    uncached_bytes: int  #: through the page cache, pages dropped at once
    buffered_bytes: int
    io_path: str  #: the last five in words
    total_seconds: float = field(default=0.0, kw_only=True)  #: from the call until it is durable, or loaded
    #: until the call returned; in asynchronous saves less than `total_seconds`
    blocked_seconds: float = field(default=0.0, kw_only=True)
    #: seconds by phase: previous save, plan, snapshot, compare (with a base), write, sync, commit; metadata, plan,
    #: read, hand over; wait (for other ranks)
    phases: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    job: JobStats | None = field(default=None, kw_only=True)  #: None where DCP's collectives do not tell


@dataclass(frozen=True)
class SaveStats(TransferStats):
    """What one rank wrote."""

    file_bytes: int  #: length of the files written
    reused_bytes: int = field(default=0, kw_only=True)  #: with `base=`: of tensor data that an older checkpoint has
    reused_tensors: int = field(default=0, kw_only=True)  #: with `base=`: boxes of tensors that were not written
    plan_reused: bool | None = field(default=None, kw_only=True)  #: whether the plan of an earlier save was used again
    #: what devices of this process refused so far, in words; the log has each once. Copies from them are slower
    device_notes: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class LoadStats(TransferStats):
    """What one rank read."""

    verified: bool
    unverified_bytes: int  #: of records that were written without checksums
    fallback_tensors: int  #: read by torch.load, because their records are not plain contiguous tensors
    shared_bytes: int = 0  #: of `bytes`: those that several ranks need and only one rank read

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

    missing: list[str]  #: in the state of a rank, and not in the checkpoint
    unexpected: list[str]  #: in the checkpoint and selected, and not in the state of any rank
    mismatched: list[Mismatch]  #: of another shape, dtype or kind in the checkpoint than in the state
    stats: LoadStats


class Damage(NamedTuple):
    """One place that is damaged, or that could not be read. If it is in `VerifyReport.damaged`, a load of `key`
    raises."""

    key: str | None  #: name of the tensor or object; None: the whole file is concerned
    file: str
    offset: int  #: bytes from the start of the file
    reason: str


@dataclass
class VerifyReport:
    """The result of `verify`."""

    path: str
    quick: bool
    damaged: list[Damage] = field(default_factory=list)
    keys: int = 0  #: tensors and objects that the metadata names
    files: int = 0  #: data files that it names, or safetensors files
    bytes: int = 0  #: of records that were read
    unverified_bytes: int = 0  #: of these, written without checksums or in a form that nothing here can check
    #: damage that no load notices: in the index, in the tables of block checksums, and in repeated parts of records.
    #: Loads still give exactly what was saved. Not checked with `quick`.
    harmless: list[Damage] = field(default_factory=list)
    #: what could not be read, because the storage refused or did not answer. It is neither sound nor damaged: nothing
    #: is known of it. Try again when the storage answers
    unreadable: list[Damage] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  #: what has no checksum or copy to be checked against, in words
    indexed: bool = False  #: whether an index belongs to the metadata; without one, loads start slower

    @property
    def ok(self) -> bool:
        """Whether loads give exactly what was saved, as far as that can be checked. If not, it is damaged, or it is not
        known, because something is unreadable."""
        return not (self.damaged or self.unreadable)

    @property
    def reason(self) -> str:
        """Why it is not ok: the first damage, or else the first place that could not be read. Empty if it is ok."""
        return next((found.reason for found in (*self.damaged, *self.unreadable)), "")


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, and where it is stored."""

    offsets: tuple[int, ...]  #: in the tensor
    sizes: tuple[int, ...]
    file: str  #: its name, relative to the checkpoint
    offset: int  #: of its record in the file
    bytes: int  #: of its record, framing included


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str  #: as torch names it, without "torch."
    bytes: int  #: of its elements
    chunks: list[StoredChunk]

    @property
    def whole(self) -> bool:
        """Whether its chunks hold all elements. Chunks do not overlap."""
        return sum(math.prod(chunk.sizes) for chunk in self.chunks) == math.prod(self.shape)


@dataclass(frozen=True)
class StoredObject:
    """A value that is no tensor. It was not unpickled."""

    file: str
    offset: int
    bytes: int


EXTRA_FILES = "__extra_files__."  #: begins the keys of `extra_files=` of a save


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds, by its metadata or headers alone. `inspect` returns it."""

    path: str
    format: str  #: "dcp", "safetensors", "torch", "npz" or "npy"
    writer: str  #: the software that wrote it, as far as its files tell; empty if they do not
    save_id: str  #: of the save; empty where the format has none
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    aliases: dict[str, str]  #: other names of stored tensors
    files: dict[str, int]  #: the length of each data file; -1 if it is missing

    @property
    def bytes(self) -> int:
        """The bytes of all tensors' elements."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def extra_files(self) -> list[str]:
        """The names of the files that were saved with `extra_files=`."""
        return [key.removeprefix(EXTRA_FILES) for key in self.objects if key.startswith(EXTRA_FILES)]

    @property
    def referred_files(self) -> list[str]:
        """The data files of other checkpoints that it names, of a save with `base=`."""
        return [name for name in self.files if name.startswith("../")]

    @property
    def referred_bytes(self) -> int:
        """The bytes of the records that it has in such files."""
        chunks = (chunk for tensor in self.tensors.values() for chunk in tensor.chunks)
        return sum(chunk.bytes for chunk in chunks if chunk.file.startswith("../"))

    @property
    def file_bytes(self) -> int:
        """The bytes of all data files that are there."""
        return sum(length for length in self.files.values() if length > 0)
