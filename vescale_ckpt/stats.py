"""What a save or load did: times, bytes and the way they took."""

from __future__ import annotations

from dataclasses import dataclass

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
