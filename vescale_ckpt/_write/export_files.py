"""`ExportSave` is one rank's save as Hugging Face's safetensors files, which all ranks write at the same time, each its
part of the plan at its final place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._engine import _C
from .._engine.errors import named_errors
from .._engine.options import engine_options
from .._engine.rows import int_table
from .._hf.folder import ExportFolder
from .._hf.header import with_ties
from .._hf.names import file_names, holds_export, temporary_name
from .._plan.save_plan import GlobalSavePlan
from .._ranks.one_place import separate
from .._storage.directory import directory_at
from ..errors import CheckpointError
from ..reports import SaveStats
from .rank_files import FileOptions, RankFiles

_NOT_PLACED = (0, 0, -1)  # what data files tell of each tensor: these have no use for it


@dataclass(frozen=True)
class Targets:
    """Where this rank's part of the plan goes."""

    names: list[str]  #: of the files
    token: str  #: of their temporary names
    table: bytes  #: for each tensor of the part a row, as `_C.SharedWriter` wants them

    @staticmethod
    def of(count: int, token: str, table: bytes) -> Targets:
        """In the `count` files of one model."""
        return Targets(file_names(count), token, table)


class ExportSave:
    """`begin` on each rank; `make_files` on the coordinator before any rank writes; then `files`; `commit` on the
    coordinator when all ranks have written; `end` on each rank, whatever happened.

    Args:
        most_file_bytes: of tensors in a file; a tensor that is larger is alone in its file.
        texts: for the headers.
    """

    def __init__(
        self,
        options: FileOptions,
        *,
        overwrite: bool = True,
        most_file_bytes: int,
        texts: list[tuple[str, str]],
    ) -> None:
        self.options = options
        self.most_file_bytes = most_file_bytes
        self.texts = texts
        self._overwrite = overwrite
        # Where the tensors lie in all files, and the folder: on the coordinator, from the plan to the end of the save.
        self._layout: _C.ExportLayout | None = None
        self._folder: ExportFolder | None = None

    @property
    def wanted(self) -> tuple[Any, ...]:
        """What a layout depends on beside the plan."""
        return self.most_file_bytes, tuple(self.texts)

    def begin(self) -> None:
        """Raises `CheckpointError` where the directory is not to be written to."""
        path = self.options.path
        directory_at(path).make()
        if not self._overwrite and holds_export(path):
            raise CheckpointError(f"{path} holds a model already and overwrite=False", path=path)

    def layout_of(self, planned: GlobalSavePlan, aliases: dict[str, str]) -> _C.ExportLayout:
        """Raises `CheckpointError` for what no safetensors file can hold."""
        try:
            texts = with_ties(self.texts, aliases)
            return _C.ExportLayout(planned.catalog(), self.most_file_bytes, texts, list(aliases.items()))
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None

    def make_files(self, made: _C.ExportLayout, names: list[str] | None = None) -> str:
        """Makes the files. Returns what their temporary names end in."""
        self._layout = made
        self._folder = ExportFolder(self.options.path, made.file_bytes, names)
        return self._folder.token

    def files(self, targets: Targets) -> ExportFiles:
        """What this rank writes to."""
        return ExportFiles(self.options, targets)

    @property
    def folder(self) -> ExportFolder:
        assert self._folder is not None
        return self._folder

    def heads(self, blocks: list[bytes]) -> list[bytes]:
        """What stands at the start of each file; `blocks` of each rank."""
        assert self._layout is not None
        return self._layout.heads(blocks)

    def commit(self, blocks: list[bytes]) -> None:
        """Makes what all ranks have written a model; `blocks` of each."""
        assert self._layout is not None
        self.folder.commit(self.heads(blocks), self._layout.index, self.options.sync_files)

    def end(self) -> None:
        """Removes what was not committed. May be called again."""
        if self._folder is not None:
            self._folder.discard()
        self._folder = self._layout = None


class ExportFiles(RankFiles):
    """A rank's boxes in all files of an export, as one thing to write to. The files are the coordinator's to remove."""

    def __init__(self, options: FileOptions, targets: Targets) -> None:
        super().__init__(options)
        self._targets = targets
        self._file: ExportFile | None = None

    @property
    def blocks(self) -> bytes:
        """What this rank adds to the checksums of the files: known when it has written."""
        return b"" if self._file is None else self._file.blocks

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> ExportFile:
        self._file = ExportFile(self.options, self._targets, in_background)
        return self._file

    def finish(self, tensors: int, objects: int) -> SaveStats:
        of_files = [] if self._file is None else [self._file.stats]
        written = sum(stats["in_place_bytes"] + stats["slot_bytes"] for stats in of_files)
        return self._stats(tensors, objects, written, written, of_files)

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()


class ExportFile:
    """The one file of `ExportFiles`."""

    name = ""  # a rank's boxes may be in many

    def __init__(self, options: FileOptions, targets: Targets, in_background: bool) -> None:
        self.options = options
        self.path = options.path
        self.blocks = b""
        self.stats: dict[str, int] = {}
        self._written = 0
        paths = [os.path.join(self.path, temporary_name(name, targets.token)) for name in targets.names]
        for_engine = engine_options(options.thread_count, options.direct_io, in_background)
        if paths and not directory_at(self.path).has(os.path.basename(paths[0])):  # the coordinator has made them all
            raise separate(self.path, [options.rank])
        with named_errors(str, self.path):
            self._shared: _C.SharedWriter | None = _C.SharedWriter(paths, targets.table, for_engine)

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        assert self._shared is not None
        with named_errors(key_of, self.path):
            self._shared.write(table, int_table(rows))
        return list(_NOT_PLACED) * len(rows)

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        assert not contents, "a layout has tensors only"
        return []

    def finish(self) -> None:
        assert self._shared is not None
        with named_errors(str, self.path):
            self.blocks = self._shared.finish(self.options.sync_files)
        self._written, self.stats = self._shared.progress(), self._shared.stats()
        self.close()

    def progress(self) -> int:
        shared = self._shared
        return self._written if shared is None else shared.progress()

    def cancel(self) -> None:
        if (shared := self._shared) is not None:
            shared.cancel()

    def close(self) -> None:
        self._shared = None
