"""A CUDA of two devices for tests, without one: the engine's own code runs against a library of our making
(tests/cpp/device/fake_cuda.cpp), whose streams are threads and whose devices' memory is the host's.

Tensors of more than `LEAST` elements in host memory count as being on a device. What loads the library keeps it: use it
in processes of their own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vescale_ckpt._engine import _C, device_streams
from vescale_ckpt._engine.tensor_checks import is_host_memory
from vescale_ckpt._read import load
from vescale_ckpt._state import tensor_table

LEAST = 100
_SOURCE = Path(__file__).parent / "cpp" / "device" / "fake_cuda.cpp"
_BUILD = Path(__file__).parents[1] / "build" / "fake_cuda"
_SONAMES = ("libcudart.so.13", "libcuda.so.1")  # by which the engine finds what is loaded


class FakeCuda:
    """What the devices were asked for, and how they are to behave."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_count.restype = ctypes.c_uint64
        library.fake_stream.restype = ctypes.c_void_p
        library.fake_reset()
        self.streams = [self._new_stream(), self._new_stream()]  #: the current ones of the two devices

    def _new_stream(self) -> int:
        return int(self._library.fake_stream())

    def count(self, name: str) -> int:
        return int(self._library.fake_count(name.encode()))

    def fail(self, name: str, skip: int = 0) -> None:
        self._library.fake_fail(name.encode(), ctypes.c_int64(skip))

    def delay_copies(self, microseconds: int) -> None:
        self._library.fake_delay(microseconds)

    def queue_fill(self, stream: int, tensor: torch.Tensor, value: int, delay_ms: int) -> None:
        """Lets a stream of the trainer fill the bytes of a tensor, later."""
        self._library.fake_fill(
            ctypes.c_void_p(stream), ctypes.c_void_p(tensor.data_ptr()), value, ctypes.c_size_t(tensor.nbytes), delay_ms
        )

    def drain(self, stream: int) -> None:
        self._library.fake_drain(ctypes.c_void_p(stream))


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda(_loaded())
    read = _C.tensor_table

    def moved(tensors: list[torch.Tensor], *how: Any) -> bytes:
        words, at = array("q", read(tensors, *how)), 0
        for tensor in tensors:
            if words[at + 2] == 1 and tensor.numel() > LEAST:
                words[at + 2] = 2 + (device_of(tensor) << 32)
            at += 4 + 2 * words[at + 3]
        return words.tobytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_table, "torch_calls", lambda: None)  # else the table is made within one call
        patch.setattr(_C, "tensor_table", moved)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=fake.streams[device]))
        patch.setattr(device_streams, "current_streams", lambda: {i: torch.cuda.current_stream(i) for i in (0, 1)})
        patch.setattr(load, "is_host_memory", lambda tensor: tensor.numel() <= LEAST and is_host_memory(tensor))
        patch.setattr(device_streams, "made_current", lambda streams, devices: nullcontext())
        assert _C.copies_from_cuda(), _C.device_info()
        yield fake


def device_of(tensor: torch.Tensor) -> int:
    """The device that a large tensor counts as being on: that of its dtype's size, as views have it, too."""
    return int(tensor.itemsize == 2)


def _loaded() -> ctypes.CDLL:
    _BUILD.mkdir(parents=True, exist_ok=True)
    libraries = [_BUILD / name for name in _SONAMES]
    if not all(path.exists() and path.stat().st_mtime >= _SOURCE.stat().st_mtime for path in libraries):
        compiler = os.environ.get("CXX", "g++")
        with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
            compiled = Path(folder) / "fake_cuda.o"
            subprocess.run(
                [compiler, "-std=c++20", "-O1", "-fPIC", "-c", str(_SOURCE), "-o", str(compiled)], check=True
            )
            for path in libraries:
                made = Path(folder) / path.name
                soname = f"-Wl,-soname,{path.name}"
                subprocess.run([compiler, "-shared", soname, str(compiled), "-pthread", "-o", str(made)], check=True)
                made.replace(path)  # by whichever process is last
    runtime, _ = (ctypes.CDLL(str(path), ctypes.RTLD_LOCAL) for path in libraries)
    return runtime
