"""Snapshots: copies of host tensors that stay as they were, whatever the trainer does next."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator

import pytest
import torch
from harness.snapshots import no_snapshot_is_left, snapshot_memory

from vescale_ckpt._engine import _C
from vescale_ckpt._engine.dtypes import dtype_code

PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert no_snapshot_is_left()


def table_of(tensors: list[torch.Tensor]) -> array[int]:
    table = array("q")
    for tensor in tensors:
        code = dtype_code(tensor.dtype, "")
        table.extend([code, tensor.data_ptr(), tensor.dim(), *tensor.shape, *tensor.stride()])
    return table


def test_is_gone_once_released() -> None:
    snapshot = _C.Snapshot(table_of([torch.ones(10)]), PLENTY, 2)
    assert snapshot_memory()["in_use_bytes"] > 0
    snapshot.release()
    snapshot.release()
    for use in (snapshot.copy, snapshot.table, lambda: snapshot.first):
        with pytest.raises(_C.EngineError, match="released"):
            use()


def test_says_what_is_wrong() -> None:
    snapshot = _C.Snapshot(table_of([torch.ones(10)]), PLENTY, 2)
    with pytest.raises(_C.EngineError, match="not started"):
        snapshot.wait()
    with pytest.raises(_C.EngineError, match="not copied"):
        snapshot.table()
    snapshot.cancel()
    with pytest.raises(_C.EngineError) as caught:
        snapshot.copy()
    assert caught.value.kind == "cancelled"
    snapshot.release()
    with pytest.raises(_C.EngineError) as caught:
        _C.Snapshot(array("q", [0, 0]), PLENTY, 2)
    assert (caught.value.kind, caught.value.item) == ("invalid", 0)


def test_waits_without_the_gil_and_outlives_its_release() -> None:
    tensors = [torch.randn(6_000_000)]
    snapshot = _C.Snapshot(table_of(tensors), PLENTY, 2)
    waiting, ended = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            snapshot.wait()
        except _C.EngineError as error:
            assert error.kind in ("cancelled", "invalid")
        ended.set()

    snapshot.start()
    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(60)
    snapshot.release()
    assert ended.wait(60)
    thread.join(60)
