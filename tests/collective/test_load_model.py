"""Random layouts against numpy: what any ranks stored in any boxes comes back in any other boxes, bit for bit.

Tensors are cut at random into boxes, each held by one or several ranks, saved by us or by stock DCP, and loaded into
boxes cut in other ways, a way of its own for each rank. What must lie there is a slice of a numpy array of bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks, run_ranks
from harness.states import DTYPES, MiB
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

import vescale_ckpt
from vescale_ckpt import LoadPlanner, SavePlanner, StorageReader, StorageWriter

RANKS = 4
FIRST_SEED = int(os.environ.get("LOAD_MODEL_SEED", "1000"))  # for longer runs by hand
CASES = int(os.environ.get("LOAD_MODEL_CASES", "14"))
#: how a case is loaded: with a `broadcast_checkpoint`, or by `dcp.load` with a planner
WAYS: list[bool | type[DefaultLoadPlanner]] = [True, False, LoadPlanner, DefaultLoadPlanner]
#: among them sizes at which records span blocks of checksums, slots of the engine and rounds of a broadcast
LONGEST = [40_000, 260, 36, 14]  # elements of the longest dimension, by number of dimensions

Array = npt.NDArray[np.uint8]  # the tensor's shape and a last dimension of the bytes of an element


@dataclass(frozen=True)
class Box:
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, array: Array) -> Array:
        return array[tuple(slice(at, at + size) for at, size in zip(self.offset, self.size, strict=True))]


def zeros(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Also of dtypes that torch cannot fill."""
    return torch.zeros(math.prod(size) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(*size)


class Value:
    """A tensor of the model."""

    def __init__(self, rng: np.random.Generator) -> None:
        ndim = int(rng.integers(1, 5))
        self.shape = tuple(int(rng.integers(1, LONGEST[ndim - 1] + 1)) for _ in range(ndim))
        self.dtype = DTYPES[rng.integers(len(DTYPES))]
        top = 2 if self.dtype is torch.bool else 256
        self.bytes: Array = rng.integers(0, top, (*self.shape, self.dtype.itemsize), dtype=np.uint8)

    def tensor(self, box: Box | None = None) -> torch.Tensor:
        """A copy of it, or of a box of it."""
        part = np.array(self.bytes if box is None else box.of(self.bytes), order="C")
        flat = torch.from_numpy(part.reshape(-1)) if part.size else torch.empty(0, dtype=torch.uint8)
        return flat.view(self.dtype).view(self.shape if box is None else box.size)

    def empty(self, box: Box | None, rng: np.random.Generator) -> torch.Tensor:
        """Somewhere to load a box to: dense, transposed, or inside something larger."""
        size = self.shape if box is None else box.size
        layout = rng.integers(3)
        if layout == 0 or self.dtype is torch.float4_e2m1fn_x2:  # torch copies that only where it is dense
            return zeros(size, self.dtype)
        if layout == 1:
            return zeros(size[::-1], self.dtype).permute(*reversed(range(len(size))))
        larger = zeros([length + 2 for length in size], self.dtype)
        for dim, length in enumerate(size):
            larger = larger.narrow(dim, 1, length)
        return larger

    def assert_in(self, found: torch.Tensor, box: Box | None, where: str) -> None:
        expected = self.bytes if box is None else box.of(self.bytes)
        dense = found.contiguous()
        memory = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage())  # type: ignore[call-overload]
        start = dense.storage_offset() * dense.itemsize
        found_bytes = memory.numpy()[start : start + expected.size]
        assert np.array_equal(found_bytes, expected.reshape(-1)), f"{where}, {box}"


def cut(shape: tuple[int, ...], rng: np.random.Generator, most: int = 7) -> list[Box]:
    """Cuts a shape from edge to edge, and what comes of it again: boxes that fill it."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(int(rng.integers(0, most))):
        number, dim = int(rng.integers(len(boxes))), int(rng.integers(len(shape)))
        box = boxes[number]
        if box.size[dim] < 2:
            continue
        at = int(rng.integers(1, box.size[dim]))
        first = Box(box.offset, (*box.size[:dim], at, *box.size[dim + 1 :]))
        start = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
        boxes[number : number + 1] = [first, Box(start, (*box.size[:dim], box.size[dim] - at, *box.size[dim + 1 :]))]
    return boxes


def some_boxes(shape: tuple[int, ...], rng: np.random.Generator) -> list[Box]:
    """Any boxes in a shape, one over another or empty, no two at one place."""
    boxes = {}
    for _ in range(int(rng.integers(0, 4))):
        offset = tuple(int(rng.integers(0, size)) for size in shape)
        boxes[offset] = tuple(int(rng.integers(0, size - at + 1)) for at, size in zip(offset, shape, strict=True))
    return [Box(offset, size) for offset, size in boxes.items()]


def sharded(value: Value, layout: list[Box], mine: list[bool], parts: list[torch.Tensor]) -> ShardedTensor:
    """What this rank holds of a tensor: `parts` are those boxes of `layout` that are `mine`. Other ranks may hold some
    of them too, or cut it in another way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    metadata = [
        ShardMetadata(list(box.offset), list(box.size), f"rank:{rank if held else (rank + 1) % size}/cpu")
        for box, held in zip(layout, mine, strict=True)
    ]
    shards = [
        Shard(part, held)
        for part, held in zip(parts, (at for at, own in zip(metadata, mine, strict=True) if own), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, torch.Size(value.shape), TensorProperties(dtype=value.dtype))
    )


class Chunks(torch.Tensor):
    """Any boxes of a tensor, of a class that DCP knows nothing of but that it tells its chunks."""

    parts: dict[Box, torch.Tensor]

    @staticmethod
    def __new__(cls, value: Value, parts: dict[Box, torch.Tensor]) -> Chunks:
        self: Chunks = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)  # type: ignore[attr-defined]
        self.parts = parts
        return self

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(part for box, part in self.parts.items() if box.offset == tuple(index.offset or ()))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


# --- One case


def _saved(value: Value, rng: np.random.Generator) -> Any:
    """What this rank saves of it. All ranks draw the same numbers."""
    kind = rng.integers(4)
    if kind == 0:
        return value.tensor()
    layout = cut(value.shape, rng)
    holders = rng.random((len(layout), RANKS)) < (0.5 if kind == 1 else 0.0)  # kind 1: with replicas
    holders[range(len(layout)), rng.integers(0, RANKS, len(layout))] = True
    mine = holders[:, dist.get_rank()].tolist()
    return sharded(value, layout, mine, [value.tensor(box) for box, held in zip(layout, mine, strict=True) if held])


def _wanted(
    value: Value, rng: np.random.Generator, own: np.random.Generator
) -> tuple[Any, dict[Box | None, torch.Tensor]]:
    """What this rank loads into, and where which box must lie then. `own` numbers differ from rank to rank."""
    if rng.random() < 0.2:  # the same on all
        tensor = zeros(value.shape, value.dtype)
        return tensor, {None: tensor}
    kind = own.integers(5)
    if kind == 0:
        return None, {}
    if kind == 1:
        tensor = value.empty(None, own)
        return tensor, {None: tensor}
    if kind == 2 and own.random() < 0.3:
        parts = {box: value.empty(box, own) for box in some_boxes(value.shape, own)}
        return Chunks(value, parts), dict(parts)
    layout = cut(value.shape, own)
    mine = (own.random(len(layout)) < 0.5).tolist()
    boxes = [box for box, held in zip(layout, mine, strict=True) if held]
    tensors = [zeros(box.size, value.dtype) for box in boxes]
    return sharded(value, layout, mine, tensors), dict(zip(boxes, tensors, strict=True))


def _values(rng: np.random.Generator) -> dict[str, Value]:
    return {f"{number}": Value(rng) for number in range(int(rng.integers(1, 6)))}


def _case(directory: Path, seed: int, stock: bool) -> int:
    rng = np.random.default_rng(seed)
    values = _values(rng)
    state = {key: _saved(value, rng) for key, value in values.items()}
    direct_io = ("auto", False)[rng.integers(2)]
    if stock:
        dcp.save(state, storage_writer=FileSystemWriter(directory, sync_files=False))
    elif rng.random() < 0.5:
        vescale_ckpt.save(directory, state)
    else:
        checksums = bool(rng.random() < 0.5)
        writer = StorageWriter(directory, sync_files=False, direct_io=direct_io, checksums=checksums)
        dcp.save(state, storage_writer=writer, planner=SavePlanner())
    shared = 0
    for way in WAYS:
        own = np.random.default_rng((seed, dist.get_rank()))
        targets, expected = {}, []
        for key, value in values.items():
            target, parts = _wanted(value, rng, own)
            if target is not None:
                targets[key] = target
                expected += [(key, box, part) for box, part in parts.items()]
        os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(int(rng.choice([8 * MiB, 128 * MiB])))
        verify = bool(rng.random() < 0.7)
        if isinstance(way, type):
            reader = StorageReader(directory, verify=verify, direct_io=direct_io)
            dcp.load(targets, storage_reader=reader, planner=way())
        else:
            report = vescale_ckpt.load(directory, targets, broadcast_checkpoint=way, verify=verify)
            assert report.missing == report.mismatched == []
            shared += report.stats.shared_bytes
        for key, box, part in expected:
            values[key].assert_in(part, box, f"{seed=} {stock=} {way=} {key}")
    return shared


def _cases(directory: Path, seeds: list[int], stock: bool) -> int:
    shared = 0
    for seed in seeds:
        try:
            shared += _case(directory / f"{seed}", seed, stock)
        except Exception as error:
            raise AssertionError(f"{seed=} {stock=}: {type(error).__name__}: {error}") from error
    return shared


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_any_boxes_of_any_ranks_come_back_in_any_others(checkpoint: Path, stock: bool) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + (CASES // 2 if stock else CASES))  # how they are read is the same
    shared = run_ranks(RANKS, _cases, checkpoint, list(seeds), stock)
    assert stock or min(shared) > 0, "ranks have read for each other"
    for seed in seeds:  # and whole tensors in one process
        values, loaded = _values(np.random.default_rng(seed)), vescale_ckpt.load(checkpoint / f"{seed}")
        for key, value in values.items():
            assert loaded[key].dtype is value.dtype and loaded[key].shape == value.shape, f"{seed=} {stock=} {key}"
            value.assert_in(loaded[key], None, f"{seed=} {stock=} {key}")


@on_ranks(RANKS)
def test_shards_without_memory_get_some(checkpoint: Path) -> None:
    value = Value(np.random.default_rng(1))
    layout = cut(value.shape, np.random.default_rng(2), most=9)
    mine = [number % RANKS == dist.get_rank() for number in range(len(layout))]
    boxes = [box for box, held in zip(layout, mine, strict=True) if held]

    def target() -> ShardedTensor:
        return sharded(value, layout, mine, [zeros(box.size, value.dtype) for box in boxes])

    vescale_ckpt.save(checkpoint, {"w": value.tensor()})
    freed, meta = target(), target()
    for shard in freed.local_shards():
        shard.tensor.untyped_storage().resize_(0)
    for shard in meta.local_shards():
        shard.tensor = shard.tensor.to("meta")
    for tensor in (freed, meta):
        vescale_ckpt.load(checkpoint, {"w": tensor})
        for box, shard in zip(boxes, tensor.local_shards(), strict=True):
            value.assert_in(shard.tensor, box, "w")


def test_a_planner_that_gives_a_tensor_without_memory_is_told(checkpoint: Path) -> None:
    class Planner(LoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return torch.empty(read_item.lengths, device="meta")

    vescale_ckpt.save(checkpoint, {"w": torch.ones(3)})
    with pytest.raises(CheckpointException, match="w: the tensor to load into has no memory"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=StorageReader(checkpoint), planner=Planner())
