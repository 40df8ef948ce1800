"""States to save, and how to compare them: bit for bit, NaNs and signs of zeros included."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmarks.planning.models import Entry
from benchmarks.planning.simulated_job import Parallelism
from vescale_ckpt._engine.dtype_codes import DTYPE_CODES
from vescale_ckpt._engine.torch_private import StridedShard

__all__ = ["StridedShard"]  # of this torch, whatever its name
State = dict[str, Any]
KiB = 1 << 10
MiB = 1 << 20

#: what torch.save can store but DCP's own planning stumbles over
UNPLANNABLE = [getattr(torch, name) for name in ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")]
DTYPES = sorted(set(DTYPE_CODES) - set(UNPLANNABLE), key=str)
SHAPES = [(), (1,), (3,), (5, 7), (2, 3, 4), (1, 2, 3, 4, 5), (300,), (70_000,), (0,), (0, 4), (4, 0, 2)]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bits at all, for a dtype of which torch may know nothing but its size."""
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.untyped_storage().nbytes()
    if size:
        values = torch.empty(size // 8 + 1, dtype=torch.int64).random_().view(torch.uint8)[:size]
        if dtype is torch.bool:
            values &= 1
        tensor.untyped_storage().copy_(values.clone().untyped_storage())
    return tensor


def numbers(*shape: int, dtype: torch.dtype = torch.float32, first: int = 0) -> torch.Tensor:
    return ((torch.arange(torch.Size(shape).numel()) + first) % 8191).to(dtype).view(shape)


def cut_storage(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    """The tensor, after its storage was cut to so many bytes. 0: freed."""
    tensor.untyped_storage().resize_(left)
    return tensor


def sharded(full: torch.Tensor, *placements: Placement, mesh: tuple[int, ...] | None = None) -> DTensor:
    """What all ranks hold of a tensor that each of them gives whole: on one line of ranks, or a mesh of this shape."""
    device_mesh = init_device_mesh("cpu", mesh or (dist.get_world_size(),))
    return distribute_tensor(full, device_mesh, placements, src_data_rank=None)


def sharded_by(full: torch.Tensor, dim: int | None) -> DTensor:
    """`sharded` by one dimension. None: replicated."""
    return sharded(full, Replicate() if dim is None else Shard(dim))


def group_of_one() -> dist.ProcessGroup:
    """A group of this rank alone. All ranks must call it."""
    group, _ = dist.new_subgroups(1)
    return group


def real_state(entries: Sequence[Entry], parallelism: Parallelism) -> State:
    """What a rank of a real job holds of what a simulation lists."""
    made: State = {}
    for entry in entries:
        if entry.dtype is None:
            made[entry.name] = 0
            continue
        full = torch.arange(math.prod(entry.shape), dtype=torch.float32).view(entry.shape).to(entry.dtype)
        if (placed := parallelism.mesh_and_placements(entry)) is not None:
            full = sharded(full, *placed[1], mesh=placed[0])
        made[entry.name] = full
    return made


def at_address(tensor: torch.Tensor, within_page: int) -> torch.Tensor:
    """A contiguous copy whose first byte lies so many bytes behind a page."""
    buffer = torch.empty(tensor.nbytes + 4096 + within_page, dtype=torch.uint8)
    start = (within_page - buffer.data_ptr()) % 4096
    copy = torch.empty(0, dtype=tensor.dtype).set_(
        buffer.untyped_storage(), start // tensor.itemsize, tensor.shape, tensor.contiguous().stride()
    )
    assert copy.data_ptr() % 4096 == within_page
    return copy.copy_(tensor)


def layouts(rows: int) -> dict[str, torch.Tensor]:
    """Tensors whose elements do not lie one behind the other, or not from the start of their storage."""
    base = random_tensor((rows, 96), torch.int32)
    image = random_tensor((2, 3, rows // 4, 32), torch.int32)
    return {
        "contiguous": base,
        "transposed": base.t(),
        "permuted": image.permute(3, 1, 0, 2),
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "every_second_row": base[::2],
        "every_third_column": base[:, ::3],
        "middle_rows": base[rows // 3 : rows // 2],
        "middle_columns": base[:, 5:70],
        "one_column": base[:, 7],
        "storage_offset": base.view(-1)[13:],
        "overlapping_windows": base.view(-1).unfold(0, 96, 32)[: rows // 2],
    }


def bits(tensor: torch.Tensor) -> bytes:
    """The values' bytes in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format)
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(plain.untyped_storage())
    return storage.numpy().tobytes()[: plain.numel() * plain.itemsize]


def assert_same(actual: Any, expected: Any, where: str = "state") -> None:
    """Equal types, structure, dtypes, shapes and bits."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: {type(actual)}"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: {actual.shape}, not {expected.shape}"
        assert bits(actual) == bits(expected), f"{where}: other values"
        return
    assert type(actual) is type(expected), f"{where}: {type(actual)}, not {type(expected)}"
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple | deque):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual), where
    else:
        assert actual == expected, f"{where}: {actual!r}, not {expected!r}"


def same(actual: Any, expected: Any) -> bool:
    """Whether `assert_same` would pass."""
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def blank(state: Any) -> Any:
    """The same structure with other values, to load into."""
    if isinstance(state, torch.Tensor):
        empty = torch.empty(state.shape, dtype=state.dtype)
        if empty.numel():
            empty.untyped_storage().fill_(1)
        return empty
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None


def state(k: int) -> State:
    """A training state whose every value depends on `k`: large, small, strided and empty tensors, and objects."""
    return {
        "model": {
            "large": torch.arange(600_000, dtype=torch.float32).add_(k).view(1000, 600),  # above 2 MiB: sent alone
            "bias": torch.full((1000,), float(k), dtype=torch.bfloat16),
            "strided": torch.arange(12_000, dtype=torch.int32).add_(k).view(100, 120).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(0.5 + k),
        },
        "step": k,
        "text": f"saved as {k}",
        "history": [k, {"loss": 1.0 / (1 + k)}],
    }


def small_state(k: int) -> State:
    """The same, a few KiB."""
    return {
        "model": {
            "weight": torch.arange(96, dtype=torch.float32).add_(k).view(12, 8),
            "scale": torch.arange(96, dtype=torch.float32).sub_(k).view(12, 8),
            "bias": torch.full((7,), float(k)),
        },
        "step": k,
        "text": f"saved as {k}",
    }


def many_kinds(k: int) -> dict[str, Any]:
    """Everything that copies may get wrong: strides, shared memory, lazy values, objects that are changed in place."""
    base = torch.arange(300_000, dtype=torch.float32).add_(k)
    return {
        **state(k),
        "base": base,
        "view": base[1000:250_000].view(249, 1000),
        "overlapping": base[200_000:],
        "transposed": base[:90_000].view(300, 300).t(),
        "same": base,
        "conjugate": torch.complex(base[:99], base[1:100]).conj(),
        "bool": base > 1000 + k,
        "float16": base[:5].half(),
        "many": [torch.full((3,), float(k + i)) for i in range(300)],
        "list": [k, [k + 1]],
    }


def change_all(values: Any) -> None:
    """In place."""
    if isinstance(values, torch.Tensor):
        values.zero_() if values.dtype is not torch.bool else values.logical_not_()
    elif isinstance(values, dict):
        for item in values.values():
            change_all(item)
    elif isinstance(values, list):
        for item in values:
            change_all(item)
        values.append("changed")


def of_rank(fill: float, size: int = 8) -> State:
    """A tensor of this rank alone, and one of all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"of {rank}": torch.full((size,), float(fill)), "w": torch.full((8,), float(fill))}


ROWS, COLUMNS = 2048, 400  # large enough to be sent alone


def whole_state(k: int) -> dict[str, Any]:
    return {
        "rows": torch.arange(ROWS * COLUMNS, dtype=torch.float32).add_(k).view(ROWS, COLUMNS),
        "replicated": torch.full((700_000,), float(k)),
        "small": torch.full((100,), float(k)),
        "step": k,
    }


def state_of_rank(k: int) -> dict[str, Any]:
    values = whole_state(k)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = values["rows"].chunk(dist.get_world_size())[dist.get_rank()].clone()
    values["rows"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return values


def mixed_state() -> dict[str, Any]:
    """A bit of everything that a training state has."""
    return {
        "model": {
            "weight": torch.randn(300, 400),
            "bias": torch.randn(300).bfloat16(),
            "transposed": torch.randn(30, 40).t(),
            "large": torch.randn(3 * MiB // 4 + 5),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.randn(300, 400)}, "head": {"step": 8}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "step": 7,
        "name": "run é",
        "generator": torch.Generator().manual_seed(3).get_state(),
        "list": [1, 2.5, {"x": "y"}, [torch.ones(2), "z"]],
        "set": {1, 2},
    }


class Tied(torch.nn.Module):
    """One tensor under two names, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.inner = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


class Witness:
    """Stateful: counts what is handed to it."""

    def __init__(self, fails: bool = False) -> None:
        self.loads = 0
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        if self.fails:
            raise ZeroDivisionError("cannot take it")


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Trains on the same random input each time. Returns the loss of each step."""
    torch.manual_seed(9)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 13)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
