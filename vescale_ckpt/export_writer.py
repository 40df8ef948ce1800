"""Writing a state as Hugging Face's safetensors files, in which all ranks write at the same time, each its part of the
plan at its final place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from . import _C, engine
from ._storage.directory import directory_at
from .data_file import DataFile, DataFiles
from .errors import CheckpointError
from .export_folder import ExportFolder
from .export_names import file_names, holds_export, temporary_name
from .one_place import separate
from .packed import NOT_KEPT, PART_ROW, GlobalSavePlan, PackedItems, SavePlans, pack_items, words
from .safetensors import with_ties
from .stats import SaveStats
from .watch import WatchedState
from .waves import write_rows
from .writer import StorageWriter

NEVER_SPLIT = 1 << 62  # bytes
_NOT_PLACED = (0, 0, -1)  # what data files tell of each tensor: these have no use for it


@dataclass(frozen=True)
class Targets:
    """Where this rank's part of the plan goes."""

    names: list[str]  #: of the files
    token: str  #: of their temporary names
    table: bytes  #: for each tensor of the part a row, as `_C.SharedWriter` wants them


@dataclass(frozen=True)
class _Answer:
    """What the coordinator tells a rank of DCP's save, in its plan."""

    files: int
    token: str
    part: bytes  #: rows of the rank's items
    places: bytes  #: of each of them


class Results(list[WriteResult]):
    """For DCP nothing; for the coordinator what a rank adds to the checksums."""

    blocks = b""


class SafetensorsWriter(StorageWriter):
    """`StorageWriter(path, format="safetensors")`."""

    #: where the tensors lie in all files, and the folder: on the coordinator, from the plan to the end of the save
    _layout: _C.ExportLayout | None = None
    _folder: ExportFolder | None = None
    targets: Targets | None = None
    blocks = b""  #: what this rank adds to the checksums of the files: known when it has written

    @property
    def wanted(self) -> tuple[Any, ...]:
        """What a layout depends on beside the plan."""
        return self.most_file_bytes, tuple(self.texts)

    # --- DCP's calls

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._unlock()
        directory_at(self.path).make()
        if not self._use_collectives:
            raise CheckpointError("safetensors files are written by all ranks together", path=self.path)
        if not self.overwrite and holds_export(self.path):
            raise CheckpointError(f"{self.path} holds a model already and overwrite=False", path=self.path)
        if not plan.usable:  # ranks would get the answers of an earlier save, with its names of files
            raise CheckpointError(
                "the planner keeps its plans (enable_plan_caching=True), which goes for data files only: to save "
                "safetensors files again take vescale_ckpt.SavePlanner, or a planner that plans each time",
                path=self.path,
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        planned = plans.planned if isinstance(plans, SavePlans) else _planned(plans)
        made = self.layout_of(planned, {})
        token = self.begin(made)
        return [
            replace(plan, storage_data=_Answer(len(made.file_bytes), token, planned.plan.part(rank), made.places(rank)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        answer = plan.storage_data
        if isinstance(answer, _Answer):  # else `targets` were given
            items = plan.items
            if isinstance(items, PackedItems):
                inventory, part = items.description.inventory, items.part
            else:
                inventory, part = pack_items(items), answer.part
                plan = replace(plan, items=[items[item] for item in words(part)[::PART_ROW]])
            table = _C.export_targets(inventory, part, answer.places)
            self.targets = Targets(file_names(answer.files), answer.token, table)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            self.commit_export([getattr(of_rank, "blocks", b"") for of_rank in results])
        finally:
            self.end()

    # --- The same in steps, on the coordinator

    def layout_of(self, planned: GlobalSavePlan, aliases: dict[str, str]) -> _C.ExportLayout:
        """Raises `CheckpointError` for what no safetensors file can hold."""
        try:
            texts = with_ties(self.texts, aliases)
            return _C.ExportLayout(planned.catalog(), self.most_file_bytes, texts, list(aliases.items()))
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None

    def begin(self, made: _C.ExportLayout, names: list[str] | None = None) -> str:
        """Makes the files. Returns what their temporary names end in."""
        self.end()
        self._layout = made
        self._folder = ExportFolder(self.path, made.file_bytes, names)
        return self._folder.token

    @property
    def folder(self) -> ExportFolder:
        assert self._folder is not None
        return self._folder

    def heads(self, blocks: list[bytes]) -> list[bytes]:
        """What stands at the start of each file; `blocks` of each rank."""
        assert self._layout is not None
        return self._layout.heads(blocks)

    def commit_export(self, blocks: list[bytes]) -> None:
        """Makes what all ranks have written a model; `blocks` of each."""
        assert self._layout is not None
        self.folder.commit(self.heads(blocks), self._layout.index, self.sync_files)

    def end(self) -> None:
        super().end()
        if self._folder is not None:
            self._folder.discard()
        self._folder = self._layout = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_folder": None, "_layout": None}

    # --- Writing this rank's part

    def data_files(self) -> ExportFiles:
        self.blocks = b""
        return ExportFiles(self)

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> Results:
        with self.data_files() as files:
            if len(items):
                file = files.open(b"")
                if isinstance(items, PackedItems) and items.is_of(planner):
                    for _ in write_rows(
                        file, items, planner, range(len(items)), engine.thread_count(self.thread_count)
                    ):
                        pass
                    items.check_unchanged()
                else:
                    state = getattr(planner, "state_dict", None)
                    watch = WatchedState(state if isinstance(state, dict) else {})
                    file.write_tensors(items, planner)
                    watch.check_unchanged()
                file.finish()
            self.last_stats = files.finish(len(items), 0)
        results = Results()
        results.blocks = self.blocks
        return results


class ExportFiles(DataFiles):
    """The files of an export as a rank sees them: one thing to write to. They are the coordinator's to remove."""

    writer: SafetensorsWriter
    names_are_final = False

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> ExportFile:
        file = ExportFile(self.writer, in_background)
        self._files.append(file)
        return file

    def finish(self, tensors: int, objects: int) -> SaveStats:
        for file in self._files:
            file.tensor_bytes = file.length = file.stats["in_place_bytes"] + file.stats["slot_bytes"]
        return super().finish(tensors, objects)


class ExportFile(DataFile):
    """A rank's boxes in all files."""

    def __init__(self, writer: SafetensorsWriter, in_background: bool) -> None:
        targets = writer.targets
        assert targets is not None
        self.writer = writer
        self.name, self.path = "", writer.path
        self.length = self.tensor_bytes = self.needed = 0
        self.stats = {}
        paths = [os.path.join(writer.path, temporary_name(name, targets.token)) for name in targets.names]
        options = engine.options(writer.thread_count, writer.direct_io, in_background)
        if paths and not directory_at(writer.path).has(os.path.basename(paths[0])):  # the coordinator has made them all
            raise separate(writer.path, [writer.rank])
        with engine.named_errors(str, writer.path):
            self._shared: _C.SharedWriter | None = _C.SharedWriter(paths, targets.table, options)

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        assert self._shared is not None
        with engine.named_errors(key_of, self.writer.path, self.needed):
            self._shared.write(table, engine.int_table(rows))
        return list(_NOT_PLACED) * len(rows)

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        assert not contents, "a layout has tensors only"
        return []

    def finish(self) -> None:
        assert self._shared is not None and isinstance(self.writer, SafetensorsWriter)
        with engine.named_errors(str, self.writer.path, self.needed):
            self.writer.blocks = self._shared.finish(self.writer.sync_files)
        self.stats = self._shared.stats()
        self._shared = None  # closes the files

    def progress(self) -> int:
        shared = self._shared
        return self.length if shared is None else shared.progress()

    def cancel(self) -> None:
        if (shared := self._shared) is not None:
            shared.cancel()

    def discard(self) -> None:
        self._shared = None


def _planned(plans: Sequence[SavePlan]) -> GlobalSavePlan:
    """A plan of what other planners have planned: each of their items is written by the rank that has it."""
    inventories = [pack_items(plan.items) for plan in plans]
    try:
        plan = _C.GlobalPlan(inventories, "lowest_rank", least_piece_bytes=NEVER_SPLIT)
    except _C.EngineError as error:  # it names the key and the ranks
        raise CheckpointError(str(error)) from None
    planned = GlobalSavePlan(inventories, [], "", plan, kept=False)
    assert planned.plan_id == NOT_KEPT
    return planned
