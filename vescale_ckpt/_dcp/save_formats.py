"""`SaveFormat` implements DCP's steps of one save for `StorageWriter`, in DCP's own layout or as safetensors files."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .._engine import _C
from .._engine.rows import NO_LIMIT, PART_ROW, words
from .._engine.torch_private import CURRENT_DCP_VERSION
from .._native import metadata_file
from .._native.metadata_file import read_metadata_of
from .._plan.save_plan import NOT_KEPT, GlobalSavePlan, PackedItems, PackedResults, SavePlans, pack_items
from .._write.export_files import ExportSave, Targets
from .._write.local_plan import write_items, write_packed
from .._write.native_save import NativeSave
from .._write.rank_files import RankFiles
from ..errors import CheckpointError
from ..reports import SaveStats
from .lazy_metadata import LazyMetadata
from .overrides import is_method_of


class SaveFormat(Protocol):
    """One save of one rank. The methods are in the order in which DCP calls `StorageWriter`."""

    def begin(self, plan: SavePlan) -> SavePlan:
        """`prepare_local_plan`, on each rank."""

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        """`prepare_global_plan`, on the coordinator. No rank writes before this returns."""

    def write(self, plan: SavePlan, planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
        """`write_data`, on each rank."""

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """`finish`, on the coordinator."""

    def end(self) -> None:
        """Ends the save, committed or not. May be called again."""


class NativeFormat:
    """A save in DCP's own layout: each rank has data files of its own."""

    def __init__(self, save: NativeSave, single_file_per_rank: bool, storage_meta: StorageMeta) -> None:
        self._save = save
        self._single_file_per_rank = single_file_per_rank
        self._storage_meta = storage_meta

    def begin(self, plan: SavePlan) -> SavePlan:
        self._save.begin()
        return plan

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._save.clean_up()
        return plans

    def write(self, plan: SavePlan, planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
        return _write(self._save.files(), plan.items, planner, self._single_file_per_rank)

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._save
        planned = metadata.planned if isinstance(metadata, LazyMetadata) else None
        if planned is None:
            save.check_shared_directory(
                [{result.storage_data.relative_path for result in of_rank} for of_rank in results]
            )
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
            metadata.storage_meta = self._storage_meta
            save.commit(metadata_file.dumps(metadata), None)
            return
        assert isinstance(metadata, LazyMetadata)
        path, save_id = save.options.path, str(self._storage_meta.save_id)
        locations, names = zip(*map(_record_locations, results), strict=True)
        save.check_shared_directory(names)
        content, index = planned.files(list(locations), list(names), path, save_id)
        if metadata.was_changed():  # for instance by a class derived from `StorageWriter`
            save.commit(_with_changes(content, metadata), None)
        else:
            save.commit(content, index)
        metadata.become(read_metadata_of, path, save.metadata_rank, save_id)

    def end(self) -> None:
        self._save.end()


@dataclass(frozen=True)
class _Answer:
    """The coordinator's answer to a rank of an export, in `SavePlan.storage_data`."""

    files: int
    token: str
    local_plan: bytes  #: rows of what the rank writes
    record_locations: bytes  #: of these rows


class _Written(list[WriteResult]):
    """An empty list of results for DCP, with this rank's contribution to the checksums for the coordinator."""

    blocks = b""


class ExportFormat:
    """A save as safetensors files, into which all ranks write."""

    def __init__(self, save: ExportSave, use_collectives: bool) -> None:
        self._save = save
        self._use_collectives = use_collectives

    def begin(self, plan: SavePlan) -> SavePlan:
        path = self._save.options.path
        if not self._use_collectives:
            raise CheckpointError("safetensors files are written by all ranks together", path=path)
        self._save.begin()
        if not plan.usable:  # DCP would reuse the answers of an earlier save, with its file names
            raise CheckpointError(
                "the planner keeps its plans (enable_plan_caching=True), which goes for data files only: to save "
                "safetensors files again take vescale_ckpt.SavePlanner, or a planner that plans each time",
                path=path,
            )
        return plan

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        planned = plans.planned if isinstance(plans, SavePlans) else _planned(plans)
        made = self._save.layout_of(planned, {})
        token = self._save.make_files(made)
        return [
            replace(plan, storage_data=_Answer(len(made.file_bytes), token, planned.plan.part(rank), made.places(rank)))
            for rank, plan in enumerate(plans)
        ]

    def write(self, plan: SavePlan, planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
        answer, items = plan.storage_data, plan.items
        assert isinstance(answer, _Answer)
        if isinstance(items, PackedItems):
            inventory, part = items.description.inventory, items.part
        else:
            inventory, part = pack_items(items), answer.local_plan
            items = [items[item] for item in words(part)[::PART_ROW]]
        table = _C.export_targets(inventory, part, answer.record_locations)
        files = self._save.files(Targets.of(answer.files, answer.token, table))
        try:
            _, stats = _write(files, items, planner)
        except BaseException:
            self.end()
            raise
        written = _Written()
        written.blocks = files.blocks
        return written, stats

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._save.commit([getattr(of_rank, "blocks", b"") for of_rank in results])

    def end(self) -> None:
        self._save.end()


def _write(
    files: RankFiles, items: Sequence[WriteItem], planner: SavePlanner, single_file: bool = True
) -> tuple[Sequence[WriteResult], SaveStats]:
    if single_file and isinstance(items, PackedItems) and items.is_of(planner):
        return write_packed(files, items)
    state = getattr(planner, "state_dict", None)
    return write_items(
        files,
        items,
        planner.resolve_data,
        state if isinstance(state, dict) else {},
        makes_tensors=_makes_tensors(planner),
        single_file=single_file,
    )


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether the planner's `resolve_data` may return tensors that are not the state's own."""
    return not isinstance(planner, DefaultSavePlanner) or any(
        not is_method_of(planner, name, DefaultSavePlanner)
        and not getattr(getattr(planner, name), "keeps_memory", False)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


def _record_locations(results: Sequence[WriteResult]) -> tuple[bytes, list[str]]:
    """The record locations of a rank's local plan, and the names of its files."""
    if isinstance(results, PackedResults):
        return results.locations, results.names
    names: dict[str, int] = {}
    table = array("q")
    for result in results:
        info = result.storage_data
        file = names.setdefault(info.relative_path, len(names))
        table.extend((file, info.offset, info.length, getattr(info, "crc", -1)))
    return table.tobytes(), list(names)


def _with_changes(content: bytes, changed: Metadata) -> bytes:
    metadata = metadata_file.loads(content, "the metadata of this save")
    metadata.state_dict_metadata = changed.state_dict_metadata
    metadata.planner_data = changed.planner_data
    metadata.storage_data = {**metadata.storage_data, **(changed.storage_data or {})}
    return metadata_file.dumps(metadata)


def _planned(plans: Sequence[SavePlan]) -> GlobalSavePlan:
    """The global plan for items that another planner has planned: each rank writes its own items."""
    inventories = [pack_items(plan.items) for plan in plans]
    try:
        plan = _C.GlobalPlan(inventories, "lowest_rank", least_piece_bytes=NO_LIMIT)
    except _C.EngineError as error:  # it names the key and the ranks
        raise CheckpointError(str(error)) from None
    planned = GlobalSavePlan(inventories, [], "", plan, kept=False)
    assert planned.plan_id == NOT_KEPT
    return planned
