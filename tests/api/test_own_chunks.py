"""Tensors that tell which chunks of a tensor they hold: by DCP's methods on the instance, or as a CheckpointableTensor.

Placements and shapes say something else of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.files import read_metadata
from harness.ranks import on_ranks
from harness.saves import load_by, save_by
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, SavePlanner, StorageWriter

FULL = torch.arange(27.0).view(9, 3)
knows_fields = hasattr(dcp, "CheckpointableTensor")

# Two chunks in one tensor, the last rows first, with a row of padding between them and behind them.
CHUNKS = {4: (0, 5), 0: (6, 4)}  # by first row of the whole tensor: first row here, and rows


def held(zeros: bool) -> torch.Tensor:
    local = torch.full((11, 3), -1.0)
    for start, (at, rows) in CHUNKS.items():
        local[at : at + rows] = 0 if zeros else FULL[start : start + rows]
    return local


def with_fields(zeros: bool = False) -> torch.Tensor:
    value: Any = held(zeros)
    value.global_shape = (9, 3)
    value.global_offsets = tuple((start, 0) for start in CHUNKS)
    value.local_offsets = tuple((at, 0) for at, _ in CHUNKS.values())
    value.local_sizes = tuple((rows, 3) for _, rows in CHUNKS.values())
    return value  # type: ignore[no-any-return]


def trained_with_fields(zeros: bool = False) -> torch.Tensor:
    fields = with_fields(zeros)
    value = torch.nn.Parameter(fields)
    vars(value).update(vars(fields))
    return value


def chunk_list() -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([rows, 3])) for start, (_, rows) in CHUNKS.items()]


def items_of(key: str, local: torch.Tensor, shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            MetadataIndex(key, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, shape),
        )
        for chunk in chunks
    ]


def with_methods(zeros: bool = False, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """A DTensor whose local tensor has the methods, as Megatron-FSDP makes them; a plain tensor of another value."""
    mesh = mesh or DeviceMesh("cpu", [0])
    value = DTensor.from_local(held(zeros), mesh, [Shard(0)], run_check=False, shape=FULL.shape, stride=FULL.stride())
    local: Any = value._local_tensor

    def shard(index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        at, rows = CHUNKS[index.offset[0]]
        return local[at : at + rows]  # type: ignore[no-any-return]

    local.__create_write_items__ = lambda key, value: items_of(key, local, FULL.shape, chunk_list())
    local.__create_chunk_list__ = chunk_list
    local.__get_tensor_shard__ = shard
    return value


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "fields": with_fields,
    "trained": trained_with_fields,
    "methods": with_methods,
}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["ours", "async", "safetensors", "dcp.save", "staged", "stock"])
def test_a_save_stores_what_the_tensor_tells(checkpoint: Path, kind: str, how: str) -> None:
    if how == "stock" and kind != "methods" and not knows_fields:
        pytest.skip("this torch has no CheckpointableTensor")
    objects = {} if how == "safetensors" else {"n": 5}
    save_by(how, checkpoint, {"a": KINDS[kind](), "b": torch.ones(2), **objects})
    whole = {"a": torch.zeros(9, 3)}
    load_by("ours", checkpoint, whole)
    assert torch.equal(whole["a"], FULL)
    if how != "safetensors":
        load_by("stock", checkpoint, whole := {"a": torch.zeros(9, 3)})
        assert torch.equal(whole["a"], FULL)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_by", ["ours", "safetensors", "stock"])
@pytest.mark.parametrize("how", ["ours", "dcp.load", "our reader", "our planner"])
def test_a_load_fills_what_the_tensor_tells(checkpoint: Path, kind: str, saved_by: str, how: str) -> None:
    if how == "our reader" and kind != "methods" and not knows_fields:
        pytest.skip("this torch has no CheckpointableTensor")
    if how == "our planner" and saved_by == "safetensors":
        pytest.skip("stock reads DCP's checkpoints")
    save_by(saved_by, checkpoint, {"a": FULL, "b": torch.ones(2)})
    target = KINDS[kind](zeros=True)
    load_by(how, checkpoint, {"a": target})
    local = target._local_tensor if isinstance(target, DTensor) else target
    assert torch.equal(local, held(zeros=False))


@pytest.mark.usefixtures("alone")
def test_an_answer_that_changes_gives_another_plan(checkpoint: Path) -> None:
    value: Any = torch.arange(6.0)
    for number, starts in enumerate([None, (0, 3), (3, 0), None]):
        if starts is None:
            for name in [name for name in vars(value) if name.startswith(("global", "local"))]:
                delattr(value, name)
        else:
            value.global_shape, value.global_offsets = (6,), tuple((start,) for start in starts)
            value.local_offsets, value.local_sizes = ((0,), (3,)), ((3,), (3,))
        vescale_ckpt.save(checkpoint / str(number), {"a": value})
        expected = torch.arange(6.0) if starts != (3, 0) else torch.tensor([3.0, 4, 5, 0, 1, 2])
        assert torch.equal(vescale_ckpt.load(checkpoint / str(number))["a"], expected)


@pytest.mark.usefixtures("alone")
def test_a_load_may_be_told_other_chunks_than_a_save(checkpoint: Path) -> None:
    value: Any = torch.arange(4.0)
    value.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
    vescale_ckpt.save(checkpoint, {"a": value})
    assert torch.equal(vescale_ckpt.load(checkpoint)["a"], value)
    vescale_ckpt.load(checkpoint, {"a": (target := torch.zeros(4))})
    assert torch.equal(target, value)


def _lies(**fields: Any) -> torch.Tensor:
    value: Any = with_fields()
    for name, field in fields.items():
        setattr(value, name, field)
    return value  # type: ignore[no-any-return]


def _methods(**methods: Any) -> torch.Tensor:
    value = with_methods()
    assert isinstance(value, DTensor)
    for name, method in methods.items():
        setattr(value._local_tensor, name, method)
    return value


def _raises(*_: object) -> Any:
    raise KeyError("no such part")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _lies(global_offsets=((4, 0),)), "zip"),
        (lambda: _lies(local_offsets=((0, 0), (8, 0))), r"expected a chunk within \(11, 3\), got \(4, 3\) at \(8, 0\)"),
        (lambda: _lies(global_offsets=((5, 0), (0, 0))), r"expected a chunk of a tensor of shape \(9, 3\)"),
        (lambda: _lies(global_shape=(9,)), "zip"),
        (lambda: _methods(__create_write_items__=_raises), "no such part"),
        (lambda: _methods(__get_tensor_shard__=lambda index: torch.ones(1, 3)), "expected a tensor of shape"),
        (lambda: _methods(__get_tensor_shard__=lambda index: torch.ones(5, 3).half()), "torch.float16"),
    ],
    ids=["lengths", "outside its memory", "outside the tensor", "dims", "raises", "shape", "dtype"],
)
def test_what_cannot_be_so_is_refused_by_name(checkpoint: Path, make: Callable[[], torch.Tensor], reason: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^the\.key: its own list of chunks cannot be used: .*{reason}"):
        vescale_ckpt.save(checkpoint, {"the": {"key": make()}})


class _ListsItems:
    def __create_write_items__(self, key: str, value: object) -> list[WriteItem]:
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", ["object", "tensor"])
def test_what_lists_other_items_than_chunks_is_refused_by_name(checkpoint: Path, what: str) -> None:
    value: Any = _ListsItems()
    if what == "tensor":
        value = torch.ones(2)
        value.__create_write_items__ = partial(_ListsItems.__create_write_items__, value)
    with pytest.raises(CheckpointError, match=r"^the\.key: a \S+ is neither a tensor of one shape, nor chunks of one"):
        vescale_ckpt.save(checkpoint, {"a": torch.ones(2), "the": {"key": value}})
    assert not (checkpoint / ".metadata").exists()


@pytest.mark.skipif(knows_fields, reason="this torch's own planning knows CheckpointableTensor")
def test_what_torch_plans_is_refused_where_torch_does_not_know_the_fields(checkpoint: Path) -> None:
    class Own(SavePlanner):
        def create_local_plan(self) -> SavePlan:
            return super().create_local_plan()

    with pytest.raises(CheckpointException, match="a: this torch does not know CheckpointableTensor"):
        dcp.save({"a": with_fields()}, storage_writer=StorageWriter(checkpoint), planner=Own())
    assert not (checkpoint / ".metadata").exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["fields", "trained"])
@pytest.mark.parametrize("how", ["ours", "dcp.load"])
def test_targets_without_memory(checkpoint: Path, kind: str, how: str) -> None:
    save_by("ours", checkpoint, {"a": FULL})
    value = KINDS[kind]()
    meta = value.detach().to("meta")
    vars(meta).update(vars(value))
    state = {"a": meta}
    load_by(how, checkpoint, state)
    for at, rows in CHUNKS.values():
        start = next(start for start, chunk in CHUNKS.items() if chunk == (at, rows))
        assert torch.equal(state["a"][at : at + rows], FULL[start : start + rows])


# --- Several ranks, as Megatron-FSDP shards: uneven, and mesh dimensions that cut in another order than from the left

ROWS = [4, 3, 0, 6]  # by position among the ranks; placements give 4, 3, 4, 2 rows (13 of them)
WHOLE = torch.arange(39.0).view(13, 3)


def _uneven(mesh: DeviceMesh, zeros: bool = False) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    position = coordinate[1] * 2 + coordinate[0]
    start, rows = sum(ROWS[:position]), ROWS[position]
    chunk = ChunkStorageMetadata((start, 0), (rows, 3))  # type: ignore[arg-type]  # tuples, as Megatron-FSDP makes them
    local: Any = WHOLE[start : start + rows].clone()

    def items(key: str, tensor: DTensor) -> list[WriteItem]:
        return items_of(key, tensor.to_local(), tensor.size(), [chunk] if tensor.to_local().numel() else [])

    if zeros:
        local.zero_()
    value = DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False, shape=WHOLE.shape, stride=(3, 1))
    value._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    value._local_tensor.__create_write_items__ = items  # type: ignore[attr-defined]
    return value


def _half(zeros: bool = False) -> torch.Tensor:
    """A CheckpointableTensor of which each node of two ranks holds a half, and both of its ranks the same."""
    start, rows = [(5, 8), (0, 5)][dist.get_rank() // 2]
    value: Any = torch.zeros(rows, 3) if zeros else WHOLE[start : start + rows].clone()
    value.global_shape, value.global_offsets = (13, 3), ((start, 0),)
    value.local_offsets, value.local_sizes = ((0, 0),), ((rows, 3),)
    return value  # type: ignore[no-any-return]


@on_ranks(4)
def test_ranks_tell_uneven_chunks_in_an_order_of_their_own(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))

    def state(zeros: bool = False) -> dict[str, Any]:
        halves = {"half": _half(zeros)}
        return {"uneven": _uneven(mesh, zeros), **halves, "b": torch.ones(2)}

    def check(loaded: dict[str, Any]) -> None:
        for key, expected in state().items():
            mine, wanted = (
                value._local_tensor if isinstance(value, DTensor) else value for value in (loaded[key], expected)
            )
            assert torch.equal(mine, wanted), key

    for how in ("ours", "safetensors", "dcp.save", "stock"):
        target = tmp_path / how
        mine = state()
        if how == "stock" and not knows_fields:
            mine["half"] = WHOLE
        save_by(how, target, mine)
        readers = ["ours", "dcp.load"] if how == "safetensors" else ["ours", "dcp.load", "stock"]
        for reader in readers:
            whole: dict[str, Any] = {"uneven": torch.zeros(13, 3), "half": torch.zeros(13, 3), "b": torch.zeros(2)}
            whole["uneven"] = distribute_tensor(whole["uneven"], mesh, [Replicate(), Shard(1)], src_data_rank=None)
            load_by(reader, target, whole)
            assert torch.equal(whole["uneven"].full_tensor(), WHOLE), (how, reader)
            assert torch.equal(whole["half"], WHOLE), (how, reader)
            if reader != "stock" or knows_fields:
                load_by(reader, target, same := state(zeros=True))
                check(same)


# --- Placements that are not known here


@pytest.mark.usefixtures("alone")
def test_an_own_placement_is_what_the_dtensor_tells_of_it(checkpoint: Path) -> None:
    own = type("Own", (Shard,), {})(0)
    local = torch.arange(6.0).view(3, 2)
    value = DTensor.from_local(local, DeviceMesh("cpu", [0]), [own], run_check=False)
    vescale_ckpt.save(checkpoint, {"a": value})
    stored = read_metadata(checkpoint).state_dict_metadata["a"]
    ((offset, size),) = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
    assert (stored.size, offset, size) == ((3, 2), (0, 0), (3, 2))


# --- SPMD types (the package spmd_types keeps them so): plain tensors of which ranks hold different values


class _Spmd(Enum):
    R, I, V, P = "RIVP"  # noqa: E741


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", list(_Spmd))
def test_a_plain_tensor_that_differs_between_ranks_by_its_type_is_no_replica(checkpoint: Path, kind: _Spmd) -> None:
    def typed() -> dict[str, Any]:
        value: Any = torch.nn.Parameter(torch.ones(3))
        value._local_type = {"dp": _Spmd.R, "tp": kind}
        return {"the": {"key": value}}

    vescale_ckpt.save(checkpoint / "plain", {"the": {"key": torch.ones(3)}})
    attempts = [lambda: vescale_ckpt.load(checkpoint / "plain", typed())]
    for number, how in enumerate(("ours", "safetensors", "dcp.save")):
        attempts.append(partial(save_by, how, checkpoint / str(number), typed()))
    for attempt in attempts:
        if kind in (_Spmd.R, _Spmd.I):
            attempt()
            continue
        with pytest.raises(
            (CheckpointError, CheckpointException), match=rf"the\.key: .*SPMD type {{tp: .*{kind.value}"
        ):
            attempt()
    with_its_place = typed()
    value = with_its_place["the"]["key"]
    value.global_shape, value.global_offsets, value.local_offsets, value.local_sizes = (3,), ((0,),), ((0,),), ((3,),)
    vescale_ckpt.save(checkpoint / "fields", with_its_place)


# --- veScale's RaggedShard: a run of a flattened prefix of dimensions, which is several boxes


@dataclass(init=False, unsafe_hash=True)
class RaggedShard(Placement):
    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __init__(self, dims: tuple[int, ...], local_units: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims
        self.local_units = local_units


class _Ragged(torch.Tensor):
    """A DTensor of its own, whose local tensor is flat in the prefix (0, 1): rows [start, end) of n * m."""

    def __new__(cls, whole: torch.Tensor, start: int, end: int) -> _Ragged:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)  # type: ignore[attr-defined]
        made._start, made._local_tensor = start, whole.flatten(0, 1)[start:end].clone()
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a ragged tensor")

    def boxes(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """First row of the local tensor, offsets and sizes of each box."""
        columns, depth = self.shape[1:]
        start: int = self._start  # type: ignore[attr-defined]
        at, end, found = start, start + len(self._local_tensor), []  # type: ignore[attr-defined]
        while at < end:
            row, column = divmod(at, columns)
            rows = 0 if column else (end - at) // columns
            sizes = (rows, columns, depth) if rows else (1, min(columns - column, end - at), depth)
            found.append((at - start, (row, column, 0), sizes))
            at += sizes[0] * sizes[1]
        return found

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        local: torch.Tensor = self._local_tensor  # type: ignore[attr-defined]
        return items_of(key, local, self.size(), self.__create_chunk_list__())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        ((first, _, sizes),) = [box for box in self.boxes() if box[1] == tuple(index.offset or ())]
        local: torch.Tensor = self._local_tensor  # type: ignore[attr-defined]
        return local[first : first + sizes[0] * sizes[1]].view(sizes)


@on_ranks(2)
def test_ragged_shards_are_what_their_methods_tell(tmp_path: Path) -> None:
    whole = torch.arange(4 * 5 * 3.0).view(4, 5, 3)
    rank = dist.get_rank()
    for at, how in enumerate(("ours", "safetensors", "dcp.save", "stock")):
        start, end = [(0, 7), (7, 20)][rank]
        save_by(how, tmp_path / how, {"a": _Ragged(whole, start, end)})
        for reader in ("ours", "dcp.load") if how == "safetensors" else ("ours", "dcp.load", "stock"):
            load_by(reader, tmp_path / how, plain := {"a": torch.zeros(4, 5, 3)})
            assert torch.equal(plain["a"], whole), (how, reader)
            other: Any = _Ragged(torch.zeros(4, 5, 3), *[(0, 13 - at), (13 - at, 20)][rank])
            load_by(reader, tmp_path / how, {"a": other})
            assert torch.equal(other._local_tensor, _Ragged(whole, *[(0, 13 - at), (13 - at, 20)][rank])._local_tensor)
    value = DTensor.from_local(
        whole.flatten(0, 1)[:10], init_device_mesh("cpu", (2,)), [RaggedShard((0, 1), (1, 1))],
        run_check=False, shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"a: .*RaggedShard"):  # without veScale's methods
        vescale_ckpt.save(tmp_path / "unknown", {"a": value})
