"""What a save or load did: times, bytes and the way they took."""

from __future__ import annotations

from dataclasses import dataclass


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
