"""What stock DCP does with the items of an inventory."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.harness.by_turns import Steps, Stopwatch
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.dtype_codes import DTYPE_CODES
from vescale_ckpt._engine.rows import OBJECT, TENSOR, Inventory

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def save_plan(inventory: Inventory) -> SavePlan:
    """The plan that stock's local planning makes of a state with such an inventory."""
    items, paths = [], {}
    for name, kind, code, requires_grad, _, shape, offset, size in _C.inventory_items(inventory):
        paths[name] = (name,)
        if kind == OBJECT:
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
            continue
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size)),
            TensorProperties(_DTYPES[code], requires_grad=requires_grad),
            torch.Size(shape),
        )
        type_ = WriteItemType.TENSOR if kind == TENSOR else WriteItemType.SHARD
        items.append(WriteItem(MetadataIndex(name, torch.Size(offset)), type_, tensor_data=data))
    return SavePlan(items, planner_data=paths)


def bytes_by_rank(inventories: Sequence[Inventory]) -> list[int]:
    """What ranks write after stock has removed duplicates; objects count as nothing."""
    plans = dedup_save_plans([save_plan(inventory) for inventory in inventories])
    return [sum(map(_item_bytes, plan.items)) for plan in plans]


def _item_bytes(item: WriteItem) -> int:
    """Of what is written: `tensor_storage_size`, which stock balances by, is that of the whole tensor."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


@contextmanager
def no_collector() -> Iterator[None]:
    """Stock at its best: Python's garbage collector would walk over all plans again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Coordinator:
    """Stock's coordinator, between what it gathers and what it sends."""

    def __init__(self, inventories: Sequence[Inventory], directory: Path) -> None:
        self._gathered = [pickle.dumps(save_plan(inventory)) for inventory in inventories]
        self._results: list[bytes] = []
        self._directory = directory

    @no_collector()
    def run(self) -> Steps:
        writer = FileSystemWriter(self._directory, sync_files=False)
        planner = DefaultSavePlanner()
        watch = Stopwatch()
        plans = [pickle.loads(plan) for plan in self._gathered]
        watch.lap("unpickle plans")
        plans, metadata = planner.create_global_plan(plans)
        watch.lap("assign and validate")
        plans = writer.prepare_global_plan(plans)
        for plan in plans:
            pickle.dumps(plan)
        watch.lap("pickle plans")
        if not self._results:
            self._results = [_results(rank, plan) for rank, plan in enumerate(plans)]
        watch.restart()
        results = [pickle.loads(result) for result in self._results]
        writer.finish(metadata, results)
        pickle.dumps(metadata)  # for its broadcast
        watch.lap("metadata")
        steps = watch.seconds
        return {"plan": sum(steps[step] for step in steps if step != "metadata"), **steps}


def _results(rank: int, plan: SavePlan) -> bytes:
    """What the rank reports once it has written its part."""
    results, offset = [], 0
    for item in plan.items:
        length = _item_bytes(item) + 1024
        info = _StorageInfo(f"__{rank}_0.distcp", offset, length)
        results.append(WriteResult(item.index, length, info))
        offset += length
    return pickle.dumps(results)
