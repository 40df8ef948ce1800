"""States to save, and how to compare them: bit for bit, NaNs and signs of zeros included."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from vescale_ckpt import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from vescale_ckpt._engine.dtypes import DTYPE_CODES

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
    storage = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
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
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual), where
    else:
        assert actual == expected, f"{where}: {actual!r}, not {expected!r}"


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


def save(
    path: str | os.PathLike[str], state: dict[str, Any], *, no_dist: bool = False, **options: Any
) -> StorageWriter:
    """Saves with our writer and planner; options are the writer's."""
    writer = StorageWriter(path, **options)
    dcp.save(state, storage_writer=writer, planner=SavePlanner(), no_dist=no_dist)
    return writer


def load(path: str | os.PathLike[str], state: dict[str, Any], **options: Any) -> StorageReader:
    """Loads with our reader and planner; options are the reader's."""
    reader = StorageReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=LoadPlanner())
    return reader


def load_blank(path: str | os.PathLike[str], state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What loading into a blank copy of `state` gives."""
    target: dict[str, Any] = blank(state)
    load(path, target, **options)
    return target


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


def data_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.suffix == ".distcp")


def error_in(error: BaseException, rank: int = 0) -> BaseException:
    """What a rank raised inside DCP's CheckpointException."""
    failures = error.failures  # type: ignore[attr-defined]
    return failures[rank][0]


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
