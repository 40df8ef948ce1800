"""`write_plan` writes one rank's part of a save that DCP plans."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from .._plan.save_plan import PackedItems
from .._write.layout import Layout
from .._write.rank_save import RankSave
from ..reports import SaveStats
from .overrides import is_method_of
from .save_planner import SavePlanner as OurSavePlanner


def write_plan(layout: Layout, plan: SavePlan, planner: SavePlanner) -> tuple[Sequence[WriteResult], SaveStats]:
    """Writes the plan that the coordinator answered with. Returns what it needs from this rank to commit."""
    items, save = layout.take_answer(plan), RankSave(layout)
    if layout.options.single_file and isinstance(items, PackedItems) and items.is_of(planner):
        stats = save.write(items)
    else:
        state = getattr(planner, "state_dict", None)
        state = state if isinstance(state, dict) else {}
        items, stats = save.write_items(items, planner.resolve_data, state, makes_tensors=_makes_tensors(planner))
    return layout.results(items), stats


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether the planner's `resolve_data` may return tensors that are not the state's own."""
    return not isinstance(planner, DefaultSavePlanner) or not all(
        is_method_of(planner, name, DefaultSavePlanner, OurSavePlanner)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )
