"""A data file that is written behind a trainer's back: watched and cancelled from another thread, slow if told so."""

from __future__ import annotations

import threading
import time
from array import array
from pathlib import Path

import pytest
import torch

from vescale_ckpt._engine import _C
from vescale_ckpt._engine.dtypes import dtype_code

THREADS = 60  # seconds that a thread gets to end


def table_of(tensor: torch.Tensor) -> array[int]:
    code = dtype_code(tensor.dtype, "")
    return array("q", [code, tensor.data_ptr(), tensor.dim(), *tensor.shape, *tensor.stride()])


def options(**throttle: int) -> _C.Options:
    return _C.Options(threads=2, slot_bytes=4 << 20, arena_bytes=16 << 20, access="direct", **throttle)


def write(writer: _C.FileWriter, table: array[int], raised: list[tuple[str, str]]) -> None:
    try:
        writer.write_tensors(table)
    except _C.EngineError as error:
        raised.append((error.kind, error.path))


def test_is_watched_and_cancelled_from_another_thread(tmp_path: Path) -> None:
    tensor = torch.ones(5_000_000)
    table = table_of(tensor)
    path = tmp_path / "file"
    writer = _C.FileWriter(str(path), _C.body_bytes(table), options(bytes_per_second=1, niceness=5), True)
    assert writer.progress() == 0
    raised: list[tuple[str, str]] = []
    thread = threading.Thread(target=write, args=(writer, table, raised))
    thread.start()
    while writer.progress() == 0 and thread.is_alive():
        time.sleep(0.001)
    assert 0 < writer.progress() < tensor.nbytes  # the second transfer has years to wait
    writer.cancel()
    thread.join(THREADS)
    assert raised == [("cancelled", str(path))]
    with pytest.raises(_C.EngineError, match="cancelled"):
        writer.finish(sync=False)
    del writer, thread
    assert not path.exists()
