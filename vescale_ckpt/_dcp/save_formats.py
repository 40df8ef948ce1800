"""`NativeFormat` and `ExportFormat` do one rank's save in the steps in which DCP calls `StorageWriter`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .._checkpoint.native import metadata_file
from .._checkpoint.native.metadata_file import read_metadata_of
from .._checkpoint.safetensors.header_texts import SHARDING_INFO, SHARDING_OFFSETS
from .._engine import _C
from .._engine.rows import PLAN_ROW, words
from .._engine.torch_private import CURRENT_DCP_VERSION
from .._plan.save_plan import GlobalSavePlan, PackedItems, PackedResults, SavePlans, pack_items
from .._ranks.message import pack, unpack
from .._write.export_save import ExportSave
from .._write.local_plan import write_items, write_packed
from .._write.native_save import NativeSave
from .._write.rank_save import RankSave
from ..errors import CheckpointError
from ..reports import SaveStats
from .lazy_metadata import LazyMetadata
from .overrides import is_method_of
from .save_planner import SavePlanner as OurSavePlanner


class NativeFormat(NativeSave):
    """A save in DCP's own layout: each rank has data files of its own."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.begin()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.clean_up()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
        return _write(self, plan.items, planner)

    def commit_results(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """DCP's `finish`."""
        path, save_id = self.options.path, self.options.save_id
        planned = metadata.planned if isinstance(metadata, LazyMetadata) else None
        if planned is None:
            self.check_shared_directory(
                [{result.storage_data.relative_path for result in of_rank} for of_rank in results]
            )
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
            metadata.storage_meta = StorageMeta(checkpoint_id=path, save_id=save_id)
            self.commit(metadata_file.dumps(metadata), None)
            return
        assert isinstance(metadata, LazyMetadata)
        locations, names = zip(*map(_record_locations, results), strict=True)
        self.check_shared_directory(names)
        content, index = planned.files(list(locations), list(names), path, save_id)
        if metadata.was_changed():  # for instance by a class derived from `StorageWriter`
            self.commit(_with_changes(content, metadata), None)
        else:
            self.commit(content, index)
        metadata.become(read_metadata_of, path, self.metadata_rank, save_id)


class _Written(list[WriteResult]):
    """An empty list of results for DCP, with this rank's contribution to the checksums for the coordinator."""

    blocks = b""


class ExportFormat(ExportSave):
    """A save as safetensors files, into which all ranks write."""

    tells_offsets = False  #: whether headers say that each tensor begins at 0, for torch's tools that consolidate files

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.begin()
        if not plan.usable:  # DCP would reuse the answers of an earlier save, with its file names
            raise CheckpointError(
                "the planner keeps its plans (enable_plan_caching=True), which goes for data files only: to save "
                "safetensors files again take vescale_ckpt.SavePlanner, or a planner that plans each time",
                path=self.options.path,
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if isinstance(plans, SavePlans):
            planned = plans.planned
        else:  # of another planner: each rank writes its own items
            planned = GlobalSavePlan([pack_items(plan.items) for plan in plans])
        made = self.layout_of(planned, {}, [_offsets_in(planned)] if self.tells_offsets else [])
        start = str(len(made.file_bytes)).encode(), self.make_files(made).encode()
        return [
            replace(plan, storage_data=pack(*start, planned.plan.local_plan(rank), made.record_locations(rank)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
        assert isinstance(plan.storage_data, bytes)
        (count, token, local_plan, locations), items = unpack(plan.storage_data), plan.items
        if isinstance(items, PackedItems):
            inventory, local_plan = items.description.inventory, items.local_plan
        else:
            inventory = pack_items(items)
            items = [items[item] for item in words(local_plan)[::PLAN_ROW]]
        self.write_to(int(count), token.decode(), _C.export_targets(inventory, local_plan, locations))
        try:
            _, stats = _write(self, items, planner)
        except BaseException:
            self.end()
            raise
        written = _Written()
        written.blocks = self.blocks
        return written, stats

    def commit_results(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """DCP's `finish`."""
        self.commit([getattr(of_rank, "blocks", b"") for of_rank in results])


def _offsets_in(planned: GlobalSavePlan) -> tuple[str, str]:
    """The text that torch's HuggingFaceStorageWriter puts into headers, for whole tensors."""
    rows = planned.catalog().rows()
    return SHARDING_INFO, json.dumps({key: {SHARDING_OFFSETS: [0] * len(shape)} for key, _, shape, *_ in rows})


def _write(save: RankSave, items: Sequence[WriteItem], planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
    if save.options.single_file and isinstance(items, PackedItems) and items.is_of(planner):
        return write_packed(save, items)
    state = getattr(planner, "state_dict", None)
    state = state if isinstance(state, dict) else {}
    return write_items(save, items, planner.resolve_data, state, makes_tensors=_makes_tensors(planner))


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether the planner's `resolve_data` may return tensors that are not the state's own."""
    return not isinstance(planner, DefaultSavePlanner) or not all(
        is_method_of(planner, name, DefaultSavePlanner, OurSavePlanner)
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
