"""`ExportSave` writes Hugging Face's safetensors files, for one rank of a save.

All ranks write the same files at the same time, each rank its part of the plan at its final offsets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from .._checkpoint.safetensors.commit import holds_model
from .._checkpoint.safetensors.folder import ExportFolder
from .._checkpoint.safetensors.header_texts import with_ties
from .._checkpoint.safetensors.model_names import file_names, holds_export, temporary_name
from .._engine import _C
from .._engine.errors import named_errors
from .._engine.options import engine_options
from .._engine.rows import int_table
from .._engine.wrapper_tensors import any_wrapper, is_wrapper, type_name
from .._observe.timeline import phase
from .._plan.save_plan import GlobalSavePlan, JoinedRanges
from .._ranks.shared_directory import separate_directories
from .._state.describe import Description
from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from ..reports import SaveStats
from .rank_save import RankSave, SaveOptions

NOT_PLACED = (0, 0, -1)  #: in place of offset, length and CRC-32 of a tensor, which exports do not need


class ExportSave(RankSave):
    """A `RankSave` as safetensors files. Before any rank writes, the coordinator calls `make_files`, and then each rank
    `write_to`."""

    def __init__(self, options: SaveOptions) -> None:
        super().__init__(options)
        self.blocks = b""  #: this rank's contribution to the checksums of the files, known after it has written
        # The offsets of the tensors in all files, and the folder. Set only on the coordinator, from the plan on.
        self._layout: _C.ExportLayout | None = None
        self._folder: ExportFolder | None = None
        self._paths: list[str] = []
        self._targets = b""
        self._files: _C.SharedWriter | None = None
        self._written = 0
        #: What ranks of a node put together, and the step that does so; None: each rank writes its own bytes.
        self._joined: tuple[JoinedRanges, int, Callable[[Any], None]] | None = None

    @property
    def wanted(self) -> tuple[Any, ...]:
        """What a layout depends on, except the plan."""
        return self.options.most_file_bytes, tuple(self.options.texts), tuple(self.options.file_numbers)

    def begin(self) -> None:
        path = self.options.path
        if self.options.alone:
            raise CheckpointError("safetensors files are written by all ranks together", path=path)
        storage = storage_at(path)
        storage.check_mounted(
            "a model in format='safetensors' that is saved in the steps of dcp.save",
            "vescale_ckpt.save(path, state, format='safetensors') saves it there, without a planner of your own",
        )
        storage.make()
        if not self.options.overwrite and holds_export(path):
            raise holds_model(path)

    def clean_up(self) -> None:
        """Does nothing: `make_files` removes files of exports that died."""

    # --- The files of all ranks

    def layout_of(
        self,
        planned: GlobalSavePlan,
        ties: dict[str, str],
        more_texts: Sequence[tuple[str, str]] = (),
        most_file_bytes: int | None = None,
    ) -> _C.ExportLayout:
        """The layout of the plan. `ties`: for names that are not stored, the name of the tensor that has their value.
        Raises `CheckpointError` for values that no safetensors file can hold."""
        limit = self.options.most_file_bytes if most_file_bytes is None else most_file_bytes
        numbers = self.options.file_numbers if most_file_bytes is None else ()
        try:
            texts = [*with_ties(self.options.texts, ties), *more_texts]
            return _C.ExportLayout(planned.catalog(), limit, texts, list(ties.items()), list(numbers))
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None

    def make_files(self, made: _C.ExportLayout, names: list[str] | None = None) -> str:
        """Makes the files. Returns the end of their temporary names."""
        self._layout = made
        self._folder = ExportFolder(self.options.path, made.file_bytes, names)
        return self._folder.token

    def write_to(self, names: int | list[str], token: str, table: bytes) -> None:
        """Sets what this rank will write to: `names` of files, or the number of a model's files; the end of their
        temporary names; and for each tensor of the rank's part a row in the form of `_C.SharedWriter`."""
        names = file_names(names) if isinstance(names, int) else names
        self._paths = [os.path.join(self.options.path, temporary_name(name, token)) for name in names]
        self._targets = table

    def join(self, joined: JoinedRanges, window_bytes: int, step: Callable[[Any], None]) -> None:
        """Lets ranks of a node put ranges together. All tensors must then be written by one `write_table`. `step` takes
        the rounds; it is called once, unless this rank fails before."""
        self._joined = joined, window_bytes, step

    @property
    def folder(self) -> ExportFolder:
        assert self._folder is not None
        return self._folder

    # --- This rank's boxes in them

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        options, paths = self.options, self._paths
        for_engine = engine_options(options.thread_count, options.direct_io, in_background)
        # The coordinator made all of them.
        if paths and not storage_at(options.path).has(os.path.basename(paths[0])):
            raise separate_directories(options.path, [options.rank])
        with named_errors(str, options.path):
            self._files = _C.SharedWriter(paths, self._targets, for_engine)
            if self._joined is not None:
                joined, window_bytes, _ = self._joined
                writer = joined.ranks.index(options.rank)
                self._files.join(joined.ranges, writer, window_bytes, joined.first_target)

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        assert self._files is not None
        with named_errors(key_of, self.options.path):
            self._files.write(table, int_table(rows))
            if self._joined is not None:
                if len(rows) != self._joined[0].first_target:
                    raise CheckpointError("ranks that put tensors together have all of theirs in one table")
                self._take_rounds()
        return list(NOT_PLACED) * len(rows)

    def _take_rounds(self) -> None:
        assert self._files is not None and self._joined is not None
        step, self._joined = self._joined[2], None
        step(self._files)

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        assert not contents, "a layout has tensors only"
        return []

    def finish(self, tensors: int, objects: int) -> SaveStats:
        if self._joined is not None:  # this rank has no tensors, but may be a writer of the node's
            if self._files is None:
                self.open(b"")
            with named_errors(str, self.options.path):
                self._take_rounds()
        files, stats = self._files, []
        if files is not None:
            with named_errors(str, self.options.path), phase("sync", self.options.path):
                self.blocks = files.finish(self.options.sync_files)
            self._written, stats = files.progress(), [files.stats()]
        self.discard()
        written = sum(of_all["in_place_bytes"] + of_all["slot_bytes"] for of_all in stats)
        return self._stats(tensors, objects, written, written, stats)

    def progress(self) -> int:
        files = self._files
        return self._written if files is None else files.progress()

    def cancel(self) -> None:
        if (files := self._files) is not None:
            files.cancel()

    def discard(self) -> None:
        """Closes the files. The coordinator removes them when the save ends."""
        self._files = None

    # --- The commit

    def heads(self, blocks: list[bytes]) -> list[bytes]:
        """The head of each file. `blocks`: those of each rank."""
        assert self._layout is not None
        return self._layout.heads(blocks)

    def commit(self, blocks: list[bytes]) -> None:
        """Commits what all ranks have written. `blocks`: those of each rank."""
        assert self._layout is not None
        self.folder.commit(self.heads(blocks), self._layout.index, self.options.sync_files)

    def end(self) -> None:
        """Removes the files if they were not committed."""
        if self._folder is not None:
            self._folder.discard()
        self._folder = self._layout = None


def refuse_wrappers(description: Description) -> None:
    """Raises `CheckpointError` with the key of a wrapper subclass, of which no safetensors file can hold the inner
    tensors."""
    if not any_wrapper(description.tensors):
        return
    for item, key in enumerate(description.names):
        number = -1 if key in description.objects else description.tensor_number(item)
        if number >= 0 and is_wrapper(tensor := description.tensors[number]):
            raise CheckpointError(
                f"{key}: safetensors files cannot hold a {type_name(tensor)}, which consists of inner tensors: save "
                "its values (dequantize()), or leave it out",
                key=key,
            )
