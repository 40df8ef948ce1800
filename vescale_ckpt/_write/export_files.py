"""`ExportSave` writes Hugging Face's safetensors files, for one rank of a save.

All ranks write the same files at the same time, each rank its part of the plan at its final offsets.
"""

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
from .._ranks.shared_directory import separate_directories
from .._storage.directory import directory_at
from ..errors import CheckpointError
from ..reports import SaveStats
from .rank_files import FileOptions, RankFiles

_NOT_PLACED = (0, 0, -1)  # in place of offset, length and CRC-32 of a tensor, which exports do not need


@dataclass(frozen=True)
class Targets:
    """The files and offsets of this rank's part of the plan."""

    names: list[str]  #: of the files
    token: str  #: of their temporary names
    table: bytes  #: for each tensor of the part a row in the form of `_C.SharedWriter`

    @staticmethod
    def of(count: int, token: str, table: bytes) -> Targets:
        """The targets in the `count` files of one model."""
        return Targets(file_names(count), token, table)


class ExportSave:
    """One rank's export. The order of calls: `begin` on each rank; `make_files` on the coordinator before any rank
    writes; `files` on each rank; `commit` on the coordinator after all ranks have written; `end` on each rank, also
    after a failure.

    Args:
        most_file_bytes: limit of the tensors in a file. A larger tensor is alone in its file.
        texts: pairs for the metadata of the headers.
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
        # The offsets of the tensors in all files, and the folder. Set only on the coordinator, from the plan on.
        self._layout: _C.ExportLayout | None = None
        self._folder: ExportFolder | None = None

    @property
    def wanted(self) -> tuple[Any, ...]:
        """What a layout depends on, except the plan."""
        return self.most_file_bytes, tuple(self.texts)

    def begin(self) -> None:
        """Raises `CheckpointError` if the directory must not be written to."""
        path = self.options.path
        directory_at(path).make()
        if not self._overwrite and holds_export(path):
            raise CheckpointError(f"{path} holds a model already and overwrite=False", path=path)

    def layout_of(self, planned: GlobalSavePlan, aliases: dict[str, str]) -> _C.ExportLayout:
        """The layout of the plan. Raises `CheckpointError` for values that no safetensors file can hold."""
        try:
            texts = with_ties(self.texts, aliases)
            return _C.ExportLayout(planned.catalog(), self.most_file_bytes, texts, list(aliases.items()))
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None

    def make_files(self, made: _C.ExportLayout, names: list[str] | None = None) -> str:
        """Makes the files. Returns the end of their temporary names."""
        self._layout = made
        self._folder = ExportFolder(self.options.path, made.file_bytes, names)
        return self._folder.token

    def files(self, targets: Targets) -> ExportFiles:
        """The files that this rank writes to."""
        return ExportFiles(self.options, targets)

    @property
    def folder(self) -> ExportFolder:
        assert self._folder is not None
        return self._folder

    def heads(self, blocks: list[bytes]) -> list[bytes]:
        """The head of each file. `blocks`: `ExportFiles.blocks` of each rank."""
        assert self._layout is not None
        return self._layout.heads(blocks)

    def commit(self, blocks: list[bytes]) -> None:
        """Commits what all ranks have written. `blocks`: `ExportFiles.blocks` of each rank."""
        assert self._layout is not None
        self.folder.commit(self.heads(blocks), self._layout.index, self.options.sync_files)

    def end(self) -> None:
        """Removes the files if they were not committed. May be called again."""
        if self._folder is not None:
            self._folder.discard()
        self._folder = self._layout = None


class ExportFiles(RankFiles):
    """A rank's boxes in all files of an export. The coordinator, not this object, removes the files."""

    def __init__(self, options: FileOptions, targets: Targets) -> None:
        super().__init__(options)
        self._targets = targets
        self._file: ExportFile | None = None

    @property
    def blocks(self) -> bytes:
        """This rank's part of the checksums of the files, known after it has written."""
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
    """The `RankFile` of `ExportFiles`. It stands for all files of the export."""

    name = ""  # there is no single name

    def __init__(self, options: FileOptions, targets: Targets, in_background: bool) -> None:
        self.options = options
        self.path = options.path
        self.blocks = b""
        self.stats: dict[str, int] = {}
        self._written = 0
        paths = [os.path.join(self.path, temporary_name(name, targets.token)) for name in targets.names]
        for_engine = engine_options(options.thread_count, options.direct_io, in_background)
        if paths and not directory_at(self.path).has(os.path.basename(paths[0])):  # the coordinator made all of them
            raise separate_directories(self.path, [options.rank])
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
