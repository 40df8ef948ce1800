"""`RankFiles` is the interface by which a rank writes a save, for data files and for boxes in shared files."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from .._engine.options import direct_io_setting, used_paths
from ..reports import SaveStats
from ..settings import DirectIO


@dataclass(frozen=True)
class FileOptions:
    """Where and how a rank writes the files of one save."""

    path: str  #: of the directory, absolute
    rank: int = 0
    thread_count: int | None = None  #: None: the setting
    direct_io: DirectIO = field(default_factory=lambda: direct_io_setting("auto"))
    checksums: bool = True
    sync_files: bool = True


class RankFile(Protocol):
    """One file of `RankFiles` while it is written."""

    name: str
    path: str

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        """Writes the tensors of the engine's table. Returns offset, length and CRC-32 of each.

        `rows`: for each tensor its row in the rank's part. It gives the position in files with a fixed layout."""

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        """Writes pickled objects, after all tensors. Returns offset, length and CRC-32 of each."""

    def finish(self) -> None:
        """Makes the content durable."""

    def progress(self) -> int:
        """Bytes that were given to the file so far. Any thread may call it."""

    def cancel(self) -> None:
        """Makes calls that run in other threads fail soon."""


class RankFiles(ABC):
    """All files that a rank writes in one save. As a context, an error discards them."""

    def __init__(self, options: FileOptions) -> None:
        self.options = options
        self._started = time.perf_counter()

    def __enter__(self) -> RankFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()

    @abstractmethod
    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> RankFile:
        """Opens a file. `body_bytes`: of each tensor that it will hold. `part`: its number, if a rank writes
        several."""

    @abstractmethod
    def finish(self, tensors: int, objects: int) -> SaveStats:
        """The statistics of the save. Call it after `finish` of each file."""

    @abstractmethod
    def discard(self) -> None:
        """Removes the files that belong to this rank alone. May be called again."""

    def _stats(
        self, tensors: int, objects: int, tensor_bytes: int, file_bytes: int, of_files: Sequence[dict[str, int]]
    ) -> SaveStats:
        names = ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes")
        total = {name: sum(stats[name] for stats in of_files) for name in names}
        return SaveStats(
            seconds=time.perf_counter() - self._started,
            tensors=tensors,
            objects=objects,
            bytes=tensor_bytes,
            io_path=used_paths(total),
            file_bytes=file_bytes,
            **total,
        )
