"""`LocalExport` saves safetensors files with `placement="local"`: each rank writes one file with its own shards.

torch's HuggingFaceStorageWriter writes the same files. Its reader assembles the shards when all files are in one
folder.
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
    """A `CollectiveSave` of one file for each rank. There is no index: readers read all files of the folder."""

    def _directory_mark(self) -> None:
        return None  # ranks need not share a directory

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
        """Takes a step and waits until all ranks have taken it. Raises on all ranks if it fails on one."""
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
    return _C.pack_inventory(names, b"".join(rows), 0), offsets
