"""Descriptions of states: right when cold, exact about change when warm, and the way back from bytes to memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.cost import calls_of
from harness.states import random_tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_ckpt import CheckpointError
from vescale_ckpt._state.describe import Describer


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """4 x 2 ranks, seen by the one at (1, 1)."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (4, 2))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...] = (17, 6), dtype: Any = None) -> DTensor:
    return distribute_tensor(random_tensor(shape, dtype or torch.float32), mesh, placements, src_data_rank=None)


def old_sharded(rows: int = 3) -> sharded_tensor.ShardedTensor:
    """Rank 3's `rows` rows, from the 12th on, of a tensor of 32."""
    boxes = [
        ShardMetadata([0, 0], [12, 2], "rank:0/cpu"),
        ShardMetadata([12, 0], [rows, 2], "rank:3/cpu"),
        ShardMetadata([12 + rows, 0], [20 - rows, 2], "rank:5/cpu"),
    ]
    properties = sharded_tensor.TensorProperties()
    return sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(
        [sharded_tensor.Shard(random_tensor((rows, 2)), boxes[1])],
        sharded_tensor.ShardedTensorMetadata(boxes, torch.Size([32, 2]), properties),
    )


def everything(mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "plain": random_tensor((3, 4)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "object": {"lr": 0.1},
        "sharded": sharded(mesh, Shard(0), Shard(1)),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "strided": sharded(mesh, _StridedShard(0, split_factor=2), Replicate()),
        "transposed": random_tensor((4, 6), torch.bfloat16).t(),
        "number": 7,
        "empty": torch.empty(0, 5, dtype=torch.int8),
        "empty shard": sharded(mesh, Shard(0), Shard(0), shape=(1, 4)),
        "replicated": sharded(mesh, Replicate(), Replicate(), dtype=torch.float8_e4m3fn),
        "elsewhere": distribute_tensor(torch.ones(8), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None),
        "trained": sharded(mesh, Shard(1), Replicate()).requires_grad_(),
    }


# --- What is described


@pytest.mark.filterwarnings("ignore")
def test_what_describes_itself_is_left_to_stock_planning(mesh: DeviceMesh) -> None:
    class Checkpointable:
        def __create_write_items__(self, key: str, value: Any) -> list[Any]:
            return []

    class Chunked:
        def __create_chunk_list__(self) -> list[Any]:
            return []

    class Local(torch.Tensor):
        def __create_write_items__(self, key: str, value: Any) -> list[Any]:
            return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]

    local = torch.ones(2).as_subclass(Local)
    other = {
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        5: torch.ones(2),
    }
    of_saves = {
        "write": Checkpointable(),
        "within": DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False),
    }
    of_loads = {"read": Chunked()}
    for loading, left in ((False, of_saves | other), (True, of_loads | other)):
        describer = Describer(loading)
        for _ in range(2):
            description = describer.describe({"a": torch.ones(1), **left, "b": 2})
            assert description.names == ["a", "b"]
            assert list(description.other) == list(left)
            assert all(description.other[key] is value for key, value in left.items())


def test_a_subclass_is_described_as_the_memory_that_it_is() -> None:
    class Weight(torch.nn.Parameter):
        pass

    def make(values: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(Weight, values, True)

    values, plain = torch.arange(6.0).view(2, 3), torch.nn.Parameter(torch.ones(2, 3))
    describer = Describer()
    expected = describer.describe({"a": plain, "b": plain})
    described = describer.describe({"a": plain, "b": (subclass := make(values))})
    assert described.inventory == expected.inventory and described.all_ready
    assert described.tensors[1].data_ptr() == subclass.data_ptr()
    with torch.no_grad():
        subclass.add_(1)
    assert described.changed() == {1}


def test_a_collective_under_way_is_described_and_not_waited_for(mesh: DeviceMesh) -> None:
    local = AsyncCollectiveTensor(torch.ones(4, 2))
    dtensor = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
    description = Describer().describe({"gathered": dtensor})
    assert description.tensors[0] is dtensor._local_tensor
    assert type(description.tensors[0]) is AsyncCollectiveTensor
    assert description.items[0][7] == (4, 2)
    assert description.ready == b"\0"


def from_local(mesh: DeviceMesh, local: torch.Tensor, *placements: Any) -> DTensor:
    """A DTensor of 17 elements, whatever this rank holds of them."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([17]), stride=(1,))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda mesh: torch.empty(3, dtype=torch.int4), "dtype torch.int4"),
        (lambda mesh: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dtype torch.qint8"),
        (lambda mesh: from_local(mesh, torch.ones(17), Partial(), Replicate()), "partial sums"),
        (
            lambda mesh: from_local(mesh, torch.ones(5), type("Ragged", (Replicate,), {})(), Replicate()),
            r"give this rank a shard of shape \(17,\), but it holds \(5,\)",
        ),
        (
            lambda mesh: from_local(mesh, torch.ones(6), Shard(0), Replicate()),
            r"give this rank a shard of shape \(5,\), but it holds \(6,\)",
        ),
    ],
    ids=["int4", "quantized", "partial", "placement", "shape"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_described_is_named(mesh: DeviceMesh, value: Callable[[DeviceMesh], Any], reason: str) -> None:
    state = {"a": 1, "the.key": value(mesh)}
    with pytest.raises(CheckpointError, match=rf"^the\.key.*{reason}") as raised:
        Describer().describe(state)
    assert raised.value.key == "the.key"  # type: ignore[attr-defined]


def test_shards_that_are_not_as_their_metadata_says_are_named(mesh: DeviceMesh) -> None:
    value = old_sharded()
    value.local_shards()[0].metadata.shard_sizes = [4, 2]
    with pytest.raises(CheckpointError, match=r"^old: its shard at \(12, 0\) is of shape \(4, 2\)"):
        Describer().describe({"old": value})


# --- What changes


@pytest.mark.filterwarnings("ignore")
def test_what_is_kept_never_shows(mesh: DeviceMesh) -> None:
    """One describer through random states: each as a new one describes it, and the same exactly if its bytes are."""
    values = [
        *everything(mesh).values(),
        old_sharded(),
        old_sharded(2),
        sharded(mesh, Shard(1), Shard(0)),
        sharded(mesh, Replicate(), Shard(0)),
        sharded(mesh, Shard(0), Shard(1)).requires_grad_(),
        torch.ones(3, 4, requires_grad=True),
        torch.nested.nested_tensor([torch.ones(2)]),
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(2).as_subclass(type("Other", (torch.Tensor,), {})),
        torch.empty(3, 4, device="meta"),
    ]
    generator = random.Random(1)
    describer, last, sames = Describer(), b"", 0
    state: dict[str, Any] = {}
    for _ in range(600):
        if generator.random() < 0.7:
            key = generator.choice("abcdef")
            if key in state and generator.random() < 0.3:
                del state[key]
            else:
                state[key] = generator.choice(values)
        description = describer.describe(state)
        fresh = Describer().describe(state)
        for field in ("inventory", "names", "sources", "table", "ready", "objects", "other"):
            assert getattr(description, field) == getattr(fresh, field)
        last, sames = description.inventory, sames + (description.inventory == last)
    assert 180 < sames < 420


# --- Cost


def test_what_ten_thousand_plain_tensors_cost() -> None:
    state = {f"layers.{number}.weight": torch.empty(4, 8) for number in range(10_000)}
    describer = Describer()
    describer.describe(state)
    assert calls_of(lambda: Describer().describe(state)) < 120
    assert calls_of(lambda: describer.describe(state)) < 120  # none for a tensor


def test_what_ten_thousand_dtensors_cost(mesh: DeviceMesh) -> None:
    like = sharded(mesh, Shard(0), Shard(1))
    state = {f"layers.{number}.weight": like.detach() for number in range(10_000)}
    describer = Describer()
    describer.describe(state)
    assert calls_of(lambda: Describer().describe(state)) < 16 * len(state)
    assert calls_of(lambda: describer.describe(state)) < 100
