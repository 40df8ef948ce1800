"""`WriterSteps` runs a layout through the calls that DCP makes to a storage writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .._checkpoint.native import metadata_pickle
from .._checkpoint.native.lazy_metadata import LazyMetadata
from .._checkpoint.native.metadata_file import read_metadata_of
from .._checkpoint.native.save_facts import stamped
from .._engine import _C
from .._engine.rows import PLAN_ROW, words
from .._engine.torch_private import CURRENT_DCP_VERSION
from .._plan.global_plan import GlobalPlan, PlanRequest
from .._ranks.message import pack, unpack
from .._write.layout import SaveOptions
from .._write.native_layout import NativeLayout
from .._write.rank_save import RankSave
from .._write.safetensors_layout import Safetensors, SafetensorsLayout, refuse_wrappers
from ..errors import CheckpointError
from ..reports import SaveStats
from .item_save import save_items
from .packed_lists import PackedItems, PackedResults, SavePlans, locations_of, pack_items, write_results
from .save_planner import SavePlanner as OurSavePlanner


class NativeSteps:
    """For DCP's own layout. `dcp.save` takes the methods in their order, between the layout's `begin` and `end`."""

    def __init__(self, options: SaveOptions) -> None:
        self.layout = NativeLayout(options)

    def answers(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator's answers to the plans of all ranks, with where each rank writes."""
        return plans

    def take_answer(self, plan: SavePlan) -> Sequence[WriteItem]:
        """Takes where this rank writes. Returns what it writes."""
        return plan.items

    def results(self, items: Sequence[WriteItem]) -> Sequence[WriteResult]:
        """What DCP hands to the coordinator. `items`: in the order of the rows that were written."""
        located = self.layout.located()
        return PackedResults(located, items) if isinstance(items, PackedItems) else write_results(items, located)

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits what all ranks have written. `results`: those of each rank."""
        layout = self.layout
        path, save_id = layout.options.path, stamped(layout.options.save_id, len(results))
        layout.options = replace(layout.options, save_id=save_id)
        if not isinstance(metadata, LazyMetadata) or (planned := metadata.planned) is None:
            layout.check_files([{result.storage_data.relative_path for result in of_rank} for of_rank in results])
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
            metadata.storage_meta = StorageMeta(checkpoint_id=path, save_id=save_id)
            layout.commit(metadata_pickle.dumps(metadata))
            return
        locations = list(map(locations_of, results))
        layout.check_files([of_rank.files for of_rank in locations])
        if metadata.was_changed():  # for instance by a class derived from `StorageWriter`
            content, _ = planned.files(locations, path, save_id)
            layout.commit(_with_changes(content, metadata))
        else:
            layout.commit(*layout.make_metadata(planned, locations, save_id))
        metadata.become(read_metadata_of, path, None, save_id)


def _with_changes(content: bytes, changed: Metadata) -> bytes:
    metadata = metadata_pickle.loads(content, "the metadata of this save")
    metadata.state_dict_metadata = changed.state_dict_metadata
    metadata.planner_data = changed.planner_data
    metadata.storage_data = {**metadata.storage_data, **(changed.storage_data or {})}
    return metadata_pickle.dumps(metadata)


class SafetensorsSteps:
    """The same for the files of a model."""

    def __init__(self, options: SaveOptions, wanted: Safetensors) -> None:
        self.layout = SafetensorsLayout(options, wanted)

    def answers(self, plans: list[SavePlan]) -> list[SavePlan]:
        path = self.layout.options.path
        if not all(plan.usable for plan in plans):  # DCP would reuse the answers of an earlier save, with its names
            raise CheckpointError(
                "the planner keeps its plans (enable_plan_caching=True), which goes for data files only: to save "
                "safetensors files again take vescale_ckpt.SavePlanner, or a planner that plans each time",
                path=path,
            )
        if isinstance(plans, SavePlans):
            planned = plans.planned
        else:  # of another planner: each rank writes its own items
            planned = GlobalPlan([PlanRequest(inventory=pack_items(plan.items), of_items=True) for plan in plans])
        made = self.layout.lay_out(planned)
        start = str(len(made.file_bytes)).encode(), self.layout.make_files(made).encode()
        return [
            replace(plan, storage_data=pack(*start, planned.plan.local_plan(rank), made.record_locations(rank)))
            for rank, plan in enumerate(plans)
        ]

    def take_answer(self, plan: SavePlan) -> Sequence[WriteItem]:
        assert isinstance(plan.storage_data, bytes)
        (count, token, local_plan, locations), items = unpack(plan.storage_data), plan.items
        if isinstance(items, PackedItems):
            refuse_wrappers(items.plan.state)
            inventory, local_plan = items.plan.state.inventory, items.plan.table
        else:
            inventory = pack_items(items)
            items = [items[item] for item in words(local_plan)[::PLAN_ROW]]
        self.layout.write_to(int(count), token.decode(), _C.export_boxes(inventory, local_plan, locations, True))
        return items

    def results(self, items: Sequence[WriteItem]) -> Sequence[WriteResult]:
        return _Results(self.layout.blocks)

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.layout.commit(*self.layout.heads([getattr(of_rank, "blocks", b"") for of_rank in results]))


class _Results(list[WriteResult]):
    """An empty list of results for DCP, with this rank's contribution to the checksums for the coordinator."""

    def __init__(self, blocks: bytes) -> None:
        super().__init__()
        self.blocks = blocks

    def __reduce__(self) -> tuple[Any, ...]:
        return _Results, (self.blocks,)


WriterSteps = NativeSteps | SafetensorsSteps


def write(steps: WriterSteps, plan: SavePlan, planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
    """Writes the plan that the coordinator answered with. Returns what it needs from this rank to commit."""
    items = steps.take_answer(plan)
    if steps.layout.options.single_file and _is_plan_of(items, planner):
        stats = RankSave(steps.layout).write(items.plan)
    else:
        items, stats = save_items(steps.layout, items, planner)
    return steps.results(items), stats


def _is_plan_of(items: Any, planner: SavePlanner) -> TypeGuard[PackedItems]:
    """Whether the planner has made these items, and so resolves them to the state's own values."""
    return isinstance(planner, OurSavePlanner) and planner.plan.items is items and isinstance(items, PackedItems)
