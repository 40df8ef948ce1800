"""`LocalExport` saves ranks that share no folder (`placement="local"`) as safetensors: each one file with what it has.

torch's HuggingFaceStorageWriter does the same, and its reader puts the boxes together when all files are in one folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from .._engine import _C
from .._engine.dtypes import dtype_code
from .._engine.rows import NO_LIMIT, TENSOR
from .._hf.header import SHARDING_INFO, SHARDING_OFFSETS, with_ties
from .._hf.names import name_of_rank
from .._plan.save_plan import PackedItems
from .._state.inventory_rows import packed_row
from .._state.shard_boxes import ShardBox
from .._write.export_files import Targets
from ..errors import CheckpointError
from .export_save import CollectiveExport


class LocalExport(CollectiveExport):
    """Used as `CollectiveSave`. There is no index: readers take all files of the folder."""

    def _place_token(self) -> None:
        return None  # each rank has a file of its own, wherever that is

    def _lay_out(self) -> None:
        self._keep_error(self._make_file)
        self.exchange.fail_together(self.error, self._phase("make files"))

    def _make_file(self) -> None:
        items, export, name = self._items, self._export, name_of_rank(self.exchange.rank)
        assert items is not None
        inventory, offsets = _boxes_as_tensors(items)
        try:
            plan = _C.GlobalPlan([inventory], "lowest_rank", least_piece_bytes=NO_LIMIT)
            texts = [*with_ties(export.texts, self._tied), (SHARDING_INFO, json.dumps(offsets))]
            made = _C.ExportLayout(plan.catalog(), NO_LIMIT, texts, list(self._tied.items()))
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None
        table = _C.export_targets(inventory, plan.part(0), made.places(0))
        self._targets = Targets([name], export.make_files(made, [name]), table)

    def _write_and_commit(self) -> None:
        self._together("write", self._write_file)
        with self._commit_in_doubt():
            self._together("make way", self._make_way)
            self._together("commit", self._give_names)

    def _together(self, phase: str, step: Callable[[], None]) -> None:
        """A step that no rank takes before all have taken the one before it."""
        self._keep_error(step)
        self.exchange.fail_together(self.error, self._phase(phase))

    def _make_way(self) -> None:
        self.exchange.may_commit()
        self._export.folder.make_way()

    def _give_names(self) -> None:
        self._commit(self._export.folder.give_names)

    def _write_file(self) -> None:
        self._write()
        export = self._export
        export.folder.complete(export.heads([self._blocks()]), export.options.sync_files)


def _boxes_as_tensors(items: PackedItems) -> tuple[bytes, dict[str, dict[str, list[int]]]]:
    """The inventory of a part of which each box is a tensor of its own, and where in the whole it begins."""
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
    return _C.pack_inventory(names, b"".join(rows), 0), offsets
