"""`Layout` decides where each part of a save is stored (file, offset), which rank writes it, and what commits it."""

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

    path: str  #: the absolute path of the directory
    rank: int = 0
    thread_count: int | None = None  #: None: the setting `threads`
    direct_io: DirectIO = field(default_factory=lambda: direct_io_setting("auto"))
    checksums: bool = True
    sync_files: bool = True
    overwrite: bool = True
    save_id: str = field(default_factory=new_save_id)
    single_file: bool = True  #: False: one file per tensor and object, in layouts that support it


class Written(NamedTuple):
    """What a rank has written to its files."""

    tensor_bytes: int
    file_bytes: int
    of_files: Sequence[dict[str, int]]  #: the engine's statistics for each file


class Layout(ABC):
    """The files of one save, on one rank. The order of calls:

    - `begin` on each rank, before any rank writes; `place`, collectively, after planning;
    - on each rank, for one file after another, `open`, `write_table` and `write_records`; then `finish`, or `discard`
      after an error. `rows` refer to the rank's part of the plan; each row is written once;
    - on the coordinator, after all ranks have written, `contents` and `commit`;
    - `end` on each rank, even after a failure.
    """

    _writer: _C.FileWriter | _C.BoxWriter | None = None  # of the open files
    _in_background = _cancelled = False
    _done_bytes = 0  # of completed files

    def __init__(self, options: SaveOptions) -> None:
        self.options = options

    @abstractmethod
    def begin(self, is_coordinator: bool) -> None:
        """Creates the directory. The coordinator removes files left by dead saves, because this save may need the
        space. Raises `CheckpointError` if the directory must not be written to."""

    # --- With the other ranks, in `vescale_ckpt.save`

    @abstractmethod
    def values(self, state: dict[str, Any], is_coordinator: bool) -> dict[str, Any]:
        """Returns what is saved of a state. On at least one rank it includes the layout's extra files, if
        there are any."""

    def left_out(self, description: State) -> Collection[str]:
        """The keys that are not stored. Raises `CheckpointError` for values that the layout cannot hold."""
        return ()

    def place(self, steps: Steps, plan: LocalPlan, planned: GlobalPlan | None) -> None:
        """Decides where this rank's part is stored; collective. `planned`: the plan of all ranks, on the coordinator.
        Raises on all ranks if any rank has failed."""
        return

    def join_ranks(self, steps: Steps, in_one_table: bool) -> None:
        """Prepares what ranks exchange while they write. Collective; called before any rank writes. `in_one_table`:
        whether one table holds the host addresses of all tensors of this rank."""
        return

    @abstractmethod
    def message(self) -> bytes:
        """Returns what the coordinator needs from this rank after it has written. Not empty."""

    @abstractmethod
    def contents(self, planned: GlobalPlan, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Returns what each rank commits; empty: nothing. `messages`: those of all ranks."""

    def hand_out(self, steps: Steps, contents: Sequence[tuple[bytes, ...]] | None) -> tuple[bytes, ...]:
        """Collective. Returns what this rank commits. `contents`: the result of `contents` on the coordinator; None on
        other ranks, and if any rank has an error."""
        return () if contents is None else contents[0]  # the coordinator alone commits

    # --- This rank's files

    @abstractmethod
    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        """Opens a file, after making the content of the previous one durable. `body_bytes`: the size in bytes of each
        tensor that it will hold. `part`: its number, if a rank writes several."""

    @abstractmethod
    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> None:
        """Writes the tensors of an engine table."""

    @abstractmethod
    def write_records(self, records: list[bytes], keys: list[str], rows: Sequence[int], of_tensors: bool) -> None:
        """Writes pickled objects, after all tensors of a file; `of_tensors`: whether they are wrapper
        subclasses of tensors, as archives of `torch.save`."""

    @abstractmethod
    def finish(self) -> Written:
        """Makes all files durable."""

    def progress(self) -> int:
        """Returns the bytes written so far. Any thread may call it."""
        writer = self._writer
        return self._done_bytes + (0 if writer is None else writer.progress())

    def cancel(self) -> None:
        """Makes running calls in other threads, and all later ones, fail soon."""
        self._cancelled = True
        if (writer := self._writer) is not None:
            writer.cancel()

    def _for_engine(self) -> _C.Options:
        return engine_options(self.options.thread_count, self.options.direct_io, self._in_background)

    @abstractmethod
    def discard(self, error: BaseException | None = None) -> None:
        """Closes the files, and removes those that belong only to this rank. Idempotent. `error`: the reason."""

    # --- The commit

    @abstractmethod
    def commit(self, *content: bytes) -> None:
        """Atomically commits what all ranks have written. `content`: an element of `contents`."""

    @abstractmethod
    def end(self) -> None:
        """Ends the save, committed or not. Idempotent."""
