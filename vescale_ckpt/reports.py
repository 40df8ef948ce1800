"""What saves, loads and checks report: times, bytes and the way they took, what fits and what is damaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import Mismatch


@dataclass(frozen=True)
class TransferStats:
    """One rank's part of a save or load. Seconds of wall time, bytes."""

    seconds: float  #: in write_data / read_data
    tensors: int
    objects: int
    bytes: int  #: of tensor data
    in_place_bytes: int  #: moved between the tensors' own memory and the file, without a copy
    slot_bytes: int  #: moved through the arena's slots
    direct_bytes: int  #: past the page cache
    uncached_bytes: int  #: through the page cache, pages dropped at once
    buffered_bytes: int
    io_path: str  #: the same in words


@dataclass(frozen=True)
class SaveStats(TransferStats):
    """What one rank wrote."""

    file_bytes: int  #: length of the files written


@dataclass(frozen=True)
class LoadStats(TransferStats):
    """What one rank read."""

    verified: bool
    unverified_bytes: int  #: of records that were written without checksums
    fallback_tensors: int  #: read by torch.load, because their records are not plain contiguous tensors
    shared_bytes: int = 0  #: of `bytes`: what several ranks need and one of them read

    @property
    def read_bytes(self) -> int:
        """Of the data files: `bytes`, what lay between them, their framing, and the rest of blocks that have one
        checksum. Without objects."""
        return self.direct_bytes + self.uncached_bytes + self.buffered_bytes


@dataclass(frozen=True)
class LoadReport:
    """How a state and a checkpoint fitted each other, by the checkpoint's keys, and what was read.

    The lists are the same on all ranks; `stats` are this rank's.
    """

    missing: list[str]  #: asked for by a rank, not in the checkpoint
    unexpected: list[str]  #: in the checkpoint, and selected, but asked for by no rank
    mismatched: list[Mismatch]  #: of another shape, dtype or kind in the checkpoint
    stats: LoadStats


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
