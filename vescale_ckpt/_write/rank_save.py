"""`RankSave` is one rank's part of a save, in any format: the rank checks the directory, writes, and commits."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .._engine.options import direct_io_setting, used_paths
from .._engine.rows import in_first_file
from .._plan.save_plan import PackedItems
from ..reports import SaveStats
from ..settings import DirectIO
from .device_notes import device_notes


def new_save_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class SaveOptions:
    """Where and how a rank writes one save."""

    path: str  #: of the directory, absolute
    rank: int = 0
    thread_count: int | None = None  #: None: the setting
    direct_io: DirectIO = field(default_factory=lambda: direct_io_setting("auto"))
    checksums: bool = True
    sync_files: bool = True
    overwrite: bool = True
    alone: bool = False  #: whether ranks save without collectives, each with metadata of its own
    save_id: str = field(default_factory=new_save_id)
    single_file: bool = True  #: in DCP's layout: False for one file for each tensor and object
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  #: in DCP's layout: copies that the commit writes
    most_file_bytes: int = 0  #: in safetensors: limit of the tensors in a file. A larger tensor is alone in its file
    #: in safetensors: pairs of key and number of its file, in place of `most_file_bytes`
    file_numbers: Sequence[tuple[str, int]] = ()
    texts: Sequence[tuple[str, str]] = ()  #: in safetensors: pairs for the metadata of the headers


class RankSave(ABC):
    """One rank's part of one save. The order of calls:

    - `begin` on each rank; then `clean_up` on the coordinator, before any rank writes;
    - on each rank `open`, `write_table` and `write_contents` for one file after another, and `finish` after the last.
      As a context around these calls, an error discards the files;
    - a commit on the coordinator, after all ranks have written;
    - `end` on each rank, also after a failure.
    """

    name = ""  #: of the open file, if only this rank writes to it
    #: whether the memory of tables is read in `finish`, too; else `write_table` has read it when it returns
    reads_in_finish = False

    def __init__(self, options: SaveOptions) -> None:
        self.options = options
        self._started: float | None = None  # when the context was entered first

    @abstractmethod
    def begin(self) -> None:
        """Makes the directory. Raises `CheckpointError` if it must not be written to."""

    @abstractmethod
    def clean_up(self) -> None:
        """Removes what saves that died have left: this save may need the space."""

    def __enter__(self) -> RankSave:
        self._started = self._started or time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()

    def unread(self, items: PackedItems) -> Mapping[int, Sequence[int]]:
        """The rows of the rank's part that need not be written, nor read: offset, length and CRC-32 of the records that
        hold them. Call it before anything is written."""
        return {}

    @abstractmethod
    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        """Opens a file, and makes the content of the one before durable. `body_bytes`: of each tensor that it will
        hold. `part`: its number, if a rank writes several."""

    @abstractmethod
    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        """Writes the tensors of the engine's table. Returns offset, length and CRC-32 of each.

        `rows`: for each tensor its row in the rank's part. It gives the position in files with a fixed layout."""

    @abstractmethod
    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        """Writes pickled objects, after all tensors of a file. Returns offset, length and CRC-32 of each."""

    def write_archives(self, archives: list[bytes], keys: list[str], rows: Sequence[int]) -> list[int]:
        """Writes the records of wrapper subclasses: archives of `torch.save`. Returns offset, length, CRC-32 of each.

        `rows`: for each its row in the rank's part."""
        return self.write_contents(archives, keys)

    def located(self, placed: Sequence[int]) -> tuple[bytes, list[str]]:
        """A table of the places of all tensors and objects, and the names of the files. `placed`: what `write_table`
        and `write_contents` returned, in the order of the rank's part."""
        return in_first_file(placed), [self.name]

    @abstractmethod
    def finish(self, tensors: int, objects: int) -> SaveStats:
        """Makes all files durable. Returns the statistics of this rank, with the given numbers of values."""

    @abstractmethod
    def progress(self) -> int:
        """Bytes that were written so far. Any thread may call it."""

    @abstractmethod
    def cancel(self) -> None:
        """Makes calls that run in other threads fail soon."""

    @abstractmethod
    def discard(self) -> None:
        """Closes the files, and removes those that belong to this rank alone. May be called again."""

    @abstractmethod
    def end(self) -> None:
        """Ends the save, committed or not. May be called again."""

    def _stats(
        self, tensors: int, objects: int, tensor_bytes: int, file_bytes: int, of_files: Sequence[dict[str, int]]
    ) -> SaveStats:
        assert self._started is not None
        names = ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes")
        total: dict[str, Any] = {name: sum(stats[name] for stats in of_files) for name in names}
        return SaveStats(
            seconds=time.perf_counter() - self._started,
            tensors=tensors,
            objects=objects,
            bytes=tensor_bytes,
            io_path=used_paths(total),
            device_notes=device_notes(),
            file_bytes=file_bytes,
            **total,
        )
