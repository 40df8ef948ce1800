"""`LocalExport` saves safetensors files with `placement="local"`: each rank writes one file with its own shards.

torch's HuggingFaceStorageWriter writes the same files. Its reader assembles the shards when all files are in one
folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from .._checkpoint.safetensors.header_texts import SHARDING_INFO, SHARDING_OFFSETS
from .._checkpoint.safetensors.model_names import name_of_rank
from .._engine import _C
from .._engine.dtypes import dtype_code
from .._engine.rows import NO_LIMIT, TENSOR
from .._observe.timeline import phase
from .._plan.save_plan import GlobalSavePlan, PackedItems
from .._state.inventory_rows import packed_row
from .._state.shard_boxes import ShardBox
from ..errors import CheckpointError
from .export_save import CollectiveExport


class LocalExport(CollectiveExport):
    """A `CollectiveSave` of one file for each rank. There is no index: readers read all files of the folder."""

    def _directory_mark(self) -> None:
        return None  # ranks need not share a directory

    def _lay_out(self) -> None:
        self.steps.take(self._make_file)
        self.steps.raise_together("make files")

    def _make_file(self) -> None:
        items, save, names = self._items, self._save, [name_of_rank(self.exchange.rank)]
        assert items is not None
        inventory, offsets = _boxes_as_tensors(items)
        planned = GlobalSavePlan([inventory])
        made = save.layout_of(planned, self._tied, [(SHARDING_INFO, json.dumps(offsets))], NO_LIMIT)
        table = _C.export_targets(inventory, planned.plan.local_plan(0), made.record_locations(0))
        save.write_to(names, save.make_files(made, names), table)

    def _write_and_commit(self) -> None:
        self._together("write", self._write_file)
        with self.exchange.commit_in_doubt(lambda: self._committed):
            self._together("make way", self._make_way)
            with phase("commit"):
                self.steps.take(self._commit, self._save.folder.give_names)
            self._raise_or_sum_up()

    def _together(self, phase: str, step: Callable[[], None]) -> None:
        """Takes a step and waits until all ranks have taken it. Raises on all ranks if it fails on one."""
        self.steps.take(step)
        self.steps.raise_together(phase)

    def _make_way(self) -> None:
        self.exchange.may_commit()
        self._save.folder.make_way()

    def _write_file(self) -> None:
        self._write()
        save = self._save
        save.folder.complete(save.heads([save.blocks]), save.options.sync_files)


def _boxes_as_tensors(items: PackedItems) -> tuple[bytes, dict[str, dict[str, list[int]]]]:
    """The inventory of a file in which each box of the local plan is a tensor of its own, and the boxes' offsets in the
    whole tensors."""
    names, rows, offsets = [], [], {}
    if objects := items.objects():
        raise CheckpointError(f"safetensors files hold tensors only, and these are none: {', '.join(objects[:10])}")
    for item, key in zip(items, map(items.key, range(len(items))), strict=True):
        chunk, properties = item.tensor_data.chunk, item.tensor_data.properties
        if key in offsets:
            raise CheckpointError(f"{key}: this rank has several pieces of it, and its file can hold one", key=key)
        offsets[key] = {SHARDING_OFFSETS: list(chunk.offsets)}
        names.append(key)
        origin = ShardBox((0,) * len(chunk.sizes), chunk.sizes, ())
        code = dtype_code(properties.dtype, key)
        rows.append(packed_row(TENSOR, code, False, properties.dtype.itemsize, origin, chunk.sizes))
    return _C.pack_inventory(names, rows, 0), offsets
