"""`Layout` decides where each piece of a save lies: in which file, at which offset, who writes it, and what commits."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._engine import _C
from .._engine.options import direct_io_setting, engine_options
from .._plan.global_plan import GlobalPlan
from .._plan.local_plan import LocalPlan
from .._ranks.steps import Steps
from .._state.state import State
from ..settings import DirectIO


def new_save_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class SaveOptions:
    """Where and how a rank writes one save."""

    path: str  #: the directory's, absolute
    rank: int = 0
    thread_count: int | None = None  #: None: the setting
    direct_io: DirectIO = field(default_factory=lambda: direct_io_setting("auto"))
    checksums: bool = True
    sync_files: bool = True
    overwrite: bool = True
    save_id: str = field(default_factory=new_save_id)
    single_file: bool = True  #: False for one file for each tensor and object, in layouts that can have it


class Written(NamedTuple):
    """What a rank has written to its files."""

    tensor_bytes: int
    file_bytes: int
    of_files: Sequence[dict[str, int]]  #: the engine's statistics of each file


class Layout(ABC):
    """The files of one save, on one rank. The order of calls:

    - `begin` on each rank, before any rank writes; `place` with all ranks, when it is planned who writes what;
    - on each rank `open`, `write_table` and `write_records` for one file after another, and `finish` after the last, or
      `discard` after an error. `rows` are those of the rank's part of the plan, each written once;
    - on the coordinator `contents`, and `commit`, after all ranks have written;
    - `end` on each rank, also after a failure.
    """

    #: whether the memory of tables is read in `finish`, too; else `write_table` has read it when it returns
    reads_in_finish = False

    _writer: _C.FileWriter | _C.BoxWriter | _C.OrderedWriter | None = None  # of what is open
    _in_background = _cancelled = False
    _done_bytes = 0  # of what is complete, and not open any more

    def __init__(self, options: SaveOptions) -> None:
        self.options = options

    @abstractmethod
    def begin(self, is_coordinator: bool) -> None:
        """Makes the directory. The coordinator removes what saves that died have left: this one may need the space.
        Raises `CheckpointError` if the directory must not be written to."""

    # --- With the other ranks of `vescale_ckpt.save`

    @abstractmethod
    def values(self, state: dict[str, Any], adds_files: bool) -> dict[str, Any]:
        """What is saved of a state. `adds_files`: whether this rank is one that adds the layout's own files to it."""

    def left_out(self, description: State) -> Collection[str]:
        """The keys that are not stored. Raises `CheckpointError` for values that the layout cannot hold."""
        return ()

    def place(self, steps: Steps, plan: LocalPlan, planned: GlobalPlan | None) -> None:
        """Decides with all ranks where the rank's part lies. `planned`: the plan of all ranks, on the coordinator.
        Raises on all ranks if one has failed."""
        return

    def join_ranks(self, steps: Steps, in_one_table: bool) -> None:
        """Called with all ranks before any rank writes. `in_one_table`: whether one table tells where all tensors of
        the rank are in host memory."""
        return

    @abstractmethod
    def message(self) -> bytes:
        """What the coordinator needs from this rank after writing. Not empty."""

    @abstractmethod
    def contents(self, planned: GlobalPlan, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """For each rank what it commits; empty: nothing. `messages`: of all ranks."""

    # --- This rank's files

    @abstractmethod
    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        """Opens a file, and makes the content of the one before durable. `body_bytes`: of each tensor that it will
        hold. `part`: its number, if a rank writes several."""

    @abstractmethod
    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> None:
        """Writes the tensors of the engine's table."""

    @abstractmethod
    def write_records(self, records: list[bytes], keys: list[str], rows: Sequence[int], of_tensors: bool) -> None:
        """Writes pickled objects, after all tensors of a file; `of_tensors`: wrapper subclasses, as archives of
        `torch.save`."""

    @abstractmethod
    def finish(self) -> Written:
        """Makes all files durable."""

    def progress(self) -> int:
        """Bytes that were written so far. Any thread may call it."""
        writer = self._writer
        return self._done_bytes + (0 if writer is None else writer.progress())

    def cancel(self) -> None:
        """Makes calls that run in other threads fail soon, and later ones."""
        self._cancelled = True
        if (writer := self._writer) is not None:
            writer.cancel()

    def _for_engine(self) -> _C.Options:
        return engine_options(self.options.thread_count, self.options.direct_io, self._in_background)

    @abstractmethod
    def discard(self, error: BaseException | None = None) -> None:
        """Closes the files, and removes those that belong to this rank alone. May be called again. `error`: why."""

    # --- The commit

    @abstractmethod
    def commit(self, *content: bytes) -> None:
        """Commits what all ranks have written, in one step. `content`: one of `contents`."""

    @abstractmethod
    def end(self) -> None:
        """Ends the save, committed or not. May be called again."""
