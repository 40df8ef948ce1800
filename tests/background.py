"""States for asynchronous saves, changed while they are saved, and saves whose background waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from damage import state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from vescale_ckpt._write.snapshot import StagedPlan

BOUND = 120.0  # seconds
ROWS, COLUMNS = 2048, 400  # large enough to be sent alone


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


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """Background writing waits for this event."""
    event = threading.Event()
    write = StagedPlan.write

    def late(part: StagedPlan) -> Any:
        assert event.wait(BOUND)
        return write(part)

    with mock.patch.object(StagedPlan, "write", late):
        try:
            yield event
        finally:
            event.set()
