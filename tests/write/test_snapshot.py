"""Snapshots: copies of host tensors that stay as they were, whatever the trainer does next."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator

import pytest
import torch
from damage import no_snapshot_is_left

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


def rows_of(table: bytes) -> list[tuple[int, int, list[int], list[int]]]:
    """dtype code, address, sizes, strides."""
    words = list(memoryview(table).cast("q"))
    rows = []
    while words:
        dtype, address, dims = words[:3]
        rows.append((dtype, address, words[3 : 3 + dims], words[3 + dims : 3 + 2 * dims]))
        del words[: 3 + 2 * dims]
    return rows


def expect_copies(snapshot: _C.Snapshot, tensors: list[torch.Tensor]) -> None:
    rows = rows_of(snapshot.table())
    assert len(rows) == len(tensors) - snapshot.first
    for (code, address, sizes, strides), tensor in zip(rows, tensors[snapshot.first :], strict=True):
        expected = tensor.contiguous()
        assert (code, sizes) == (dtype_code(tensor.dtype, ""), list(tensor.shape))
        if tensor.numel() != 0:
            assert strides == list(torch.empty(tensor.shape).stride())
        raw = bytes(expected.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        assert ctypes.string_at(address, len(raw)) == raw


def some_of_everything() -> list[torch.Tensor]:
    shared = torch.randn(1000, 700)
    return [
        torch.tensor(2.5),
        torch.empty(0, 4),
        shared,
        shared.t(),
        shared[10:20],
        shared[:, ::3],
        shared.t(),
        shared.view(torch.int32)[5:11],
        torch.randn(33, 5).to(torch.bfloat16),
        torch.randn(7, 3, dtype=torch.complex128).transpose(0, 1),
        torch.ones(1, 4).expand(3, 4),
        torch.arange(5).to(torch.uint8),
        torch.randn(2_000_003),
    ]


@pytest.mark.parametrize("background", [False, True])
def test_holds_what_the_tensors_were(background: bool) -> None:
    tensors = some_of_everything()
    before = [tensor.clone() for tensor in tensors]
    snapshot = _C.Snapshot(table_of(tensors), PLENTY, 2)
    assert (snapshot.rows, snapshot.first) == (len(tensors), 0)
    if background:
        snapshot.start()
        while not snapshot.wait(0.001):
            pass
    else:
        snapshot.copy()
    for tensor in tensors:
        if tensor.is_contiguous():
            tensor.zero_()
    expect_copies(snapshot, before)
    snapshot.release()


def test_is_gone_once_released() -> None:
    snapshot = _C.Snapshot(table_of([torch.ones(10)]), PLENTY, 2)
    assert _C.snapshot_memory()["in_use_bytes"] > 0
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
