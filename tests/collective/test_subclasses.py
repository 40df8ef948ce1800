"""Tensors of other classes (own subclasses of Tensor and Parameter): saved as the tensors that they are, as stock DCP
does, also if only one of the ranks holds such a class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.files import read_metadata
from harness.ranks import on_ranks
from harness.saves import loaded, save_by, stock_load
from harness.states import assert_same, cut_storage
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as OldShard
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.masked import masked_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, SavePlanner, StorageWriter


class Mine(torch.Tensor):
    pass


class Weight(torch.nn.Parameter):
    pass


class Counting(torch.Tensor):
    """Its functions go through code of its own."""

    called = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.called += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatched(torch.Tensor):
    """Its operations do."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


class Hostile(torch.Tensor):
    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape")


class OnlyRead(torch.Tensor):
    """Lists its chunks for loads, and nothing for saves."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise AssertionError("a save does not ask")


class Chunked:
    """The same of an object."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunked) and other.n == self.n

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise AssertionError("a save does not ask")


class Sharded(ShardedTensor):
    pass


class OwnDTensor(DTensor):
    pass


CLASSES = [Mine, Weight, Counting, Dispatched, Hostile, OnlyRead]
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mine": lambda values: values.as_subclass(Mine),
    "weight": lambda values: torch.Tensor._make_subclass(Weight, values, values.requires_grad),
    "counting": lambda values: values.as_subclass(Counting),
    "dispatched": lambda values: torch.Tensor._make_subclass(Dispatched, values),
    "hostile": lambda values: values.as_subclass(Hostile),
    "only read": lambda values: values.as_subclass(OnlyRead),
    "collective": lambda values: AsyncCollectiveTensor(values),
    "buffer": lambda values: torch.nn.Buffer(values),
}
CUT = ("weight", "dispatched")
NO_SHAPE = ("hostile",)  #: DCP's items are written by their shapes
NOT_STOCK = ("collective", *NO_SHAPE)  #: torch.save cannot write these


def values(step: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(24.0).view(4, 6) + step
    complex_numbers = torch.complex(numbers, -numbers)
    return {
        "large": (torch.arange(540_000.0) + step).view(540, 1000),  # cut between ranks
        "rows": numbers,
        "transposed": numbers.t(),
        "windows": numbers.view(-1).unfold(0, 4, 2),
        "conjugated": complex_numbers.conj(),
        "negated": complex_numbers.conj().imag,
        "small": numbers.bfloat16()[1, 2:],
        "bits": numbers > 5,
        "scalar": torch.tensor(step),
        "empty": torch.empty(0, 3),
    }


def state(step: int, holds: bool, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a rank saves that `holds` the subclasses, or the same values in plain tensors."""
    found: dict[str, Any] = {"plain": torch.arange(7.0) + step, "object": {"step": step}}
    for kind, make in KINDS.items():
        if kind not in left_out:
            found[kind] = {name: make(value) if holds else value for name, value in values(step).items()}
            if kind not in CUT:
                del found[kind]["large"]
    return found


def expected(step: int, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    return state(step, holds=False, left_out=left_out)


def described(path: str | Path) -> dict[str, Any]:
    """Shape, dtype and whether a gradient is required, as the metadata has them."""
    return {
        key: None if isinstance(entry, BytesStorageMetadata)
        else (entry.size, entry.properties.dtype, entry.properties.requires_grad)
        for key, entry in read_metadata(Path(path)).state_dict_metadata.items()
    }  # fmt: skip


def check(path: str, wanted: dict[str, Any], *, stock: bool = True) -> None:
    assert_same(loaded(path, wanted), wanted)
    if stock:
        assert_same(stock_load(path, wanted), wanted)


@on_ranks(2)
def test_one_of_two_ranks_holds_subclasses(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals(CLASSES)
    planner = SavePlanner()
    for step in range(2):
        holds = dist.get_rank() != step  # the second time the other rank
        saved, wanted = state(step, holds), expected(step)
        stats = vescale_ckpt.save(f"{tmp_path}/save", saved).result()
        assert stats.plan_reused is (step > 0)  # it is the plan of plain tensors
        check(f"{tmp_path}/save", wanted, stock=step > 0)
        handle = vescale_ckpt.save(f"{tmp_path}/async", saved, async_checkpoint=True)
        with torch.no_grad():
            for kind in KINDS:
                saved[kind]["rows"].zero_()  # the copy is complete
        assert handle.result().plan_reused
        check(f"{tmp_path}/async", wanted, stock=False)
        dcp.save(state(step, holds), storage_writer=StorageWriter(f"{tmp_path}/dcp"), planner=planner)
        check(f"{tmp_path}/dcp", wanted, stock=False)
    stock, ours, wanted = state(5, holds, NOT_STOCK), state(5, holds, NO_SHAPE), expected(5, NOT_STOCK)
    save_by("stock", f"{tmp_path}/stock", stock)
    check(f"{tmp_path}/stock", wanted)
    save_by("our planner", f"{tmp_path}/our planner", stock)
    check(f"{tmp_path}/our planner", wanted)
    save_by("our writer", f"{tmp_path}/our writer", ours)
    check(f"{tmp_path}/our writer", expected(5, NO_SHAPE))
    by_stock = described(f"{tmp_path}/stock")
    for way in ("save", "async", "dcp", "our planner", "our writer"):
        of_way = described(f"{tmp_path}/{way}")
        assert {key: of_way[key] for key in by_stock} == by_stock, way


# --- Kinds that both ranks hold


@on_ranks(2)
def test_subclasses_of_dtensor_and_shardedtensor_are_what_these_are(tmp_path: Path) -> None:
    mesh, full = init_device_mesh("cpu", (2,)), torch.arange(30.0).view(6, 5)
    local = full.tensor_split(2)[dist.get_rank()]
    rows = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
    metadata = [ShardMetadata([3 * rank, 0], [3, 5], f"rank:{rank}/cpu") for rank in range(2)]

    def sharded_tensor(mine: torch.Tensor) -> ShardedTensor:
        of_all = ShardedTensorMetadata(metadata, full.size(), TensorProperties(dtype=full.dtype))
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [OldShard(mine, metadata[dist.get_rank()])], of_all
        )

    old = sharded_tensor(local.clone())
    old.__class__ = Sharded
    saved = {
        "rows": OwnDTensor(rows._local_tensor, rows._spec, requires_grad=False),
        "old": old,
        "chunked": Chunked(3),
        "x": torch.ones(2),
    }
    assert type(saved["rows"]) is OwnDTensor
    assert vescale_ckpt.save(f"{tmp_path}/ours", saved).result().plan_reused is False
    assert vescale_ckpt.save(f"{tmp_path}/ours", saved, async_checkpoint=True).result().plan_reused
    save_by("stock", f"{tmp_path}/stock", saved)
    for way in ("ours", "stock"):
        tensors = {"rows": torch.zeros(6, 5), "old": torch.zeros(6, 5), "x": torch.zeros(2)}
        vescale_ckpt.load(f"{tmp_path}/{way}", tensors)
        assert_same(tensors, {"rows": full, "old": full, "x": torch.ones(2)})
        objects = {"chunked": None}
        vescale_ckpt.load(f"{tmp_path}/{way}", objects, weights_only=False)
        assert objects["chunked"] == Chunked(3)
    filled = torch.zeros(3, 5)
    dcp.load({"old": sharded_tensor(filled)}, storage_reader=FileSystemReader(f"{tmp_path}/ours"))
    assert_same(filled, local)
    assert described(f"{tmp_path}/ours") == described(f"{tmp_path}/stock")


# --- Refused by name on all ranks, if only one of them holds it


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "uninitialized": torch.nn.UninitializedParameter,
    "meta": lambda: torch.ones(3, device="meta").as_subclass(Mine),
    "masked": lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
    "freed": lambda: cut_storage(torch.ones(3)).as_subclass(Mine),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_what_has_no_values_to_store_is_refused_by_name(tmp_path: Path) -> None:
    vescale_ckpt.save(f"{tmp_path}/jagged", {"old": torch.ones(2)})
    for kind, make in REFUSED.items():
        state = {"other": torch.ones(2), **({"the": {"key": make()}} if dist.get_rank() else {})}
        reason = "a tensor on the meta device has no values to store" if kind == "meta" else ""
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError, match=rf"rank 1: CheckpointError: the\.key: {reason}"):
                vescale_ckpt.save(f"{tmp_path}/{kind}", state, async_checkpoint=asynchronous).result()
    assert list(vescale_ckpt.load(f"{tmp_path}/jagged")) == ["old"]
