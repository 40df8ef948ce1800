"""A CUDA of two devices for tests, without one: the engine's own code runs against a library of our making
(tests/cpp/fakes/fake_cuda.cpp), whose streams are threads and whose devices' memory is the host's.

Tensors of more than `LEAST` elements in host memory count as being on a device. The storage of each is an allocation
there: a copy that crosses its border fails, and so does one of memory that is in none. What loads the library keeps it:
use it in processes of their own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from vescale_ckpt._checkpoint import record_reader
from vescale_ckpt._engine import _C, device_streams
from vescale_ckpt._engine.tensor_checks import is_host_memory
from vescale_ckpt._state import tensor_table

LEAST = 100
_SOURCE = Path(__file__).parents[1] / "cpp" / "fakes" / "fake_cuda.cpp"
_BUILD = Path(__file__).parents[2] / "build" / "fake_cuda"
_CSRC = Path(__file__).parents[2] / "csrc"
_LANES = ("device/pack_rows.h", "device/word_sums.h", "device/word_table.h", "base/field.h")
# By which the engine finds what is loaded.
_RUNTIME, _DRIVER, _OTHER_RUNTIME = "libcudart.so.13", "libcuda.so.1", "libcudart.so.12"
# cudaErrorMemoryAllocation, cudaErrorInsufficientDriver, cudaErrorAssert
OUT_OF_MEMORY, INSUFFICIENT_DRIVER, ASSERT = 2, 35, 710


#: For tests that use it.
needs_fake_cuda = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="torch has loaded a runtime of its own, which is found first",
)


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

    def fail(self, name: str, skip: int = 0, code: int = 1) -> None:
        self._library.fake_fail(name.encode(), ctypes.c_int64(skip), code)

    def last_error(self) -> int:
        return int(self._library.fake_last_error())

    def stick(self, code: int) -> None:
        """Lets work of the trainer have failed on the device: all calls give this error from now on."""
        self._library.fake_stick(code)

    def answer(self, question: str, answer: int) -> None:
        """Lets the driver answer a question otherwise than a new one does."""
        self._library.fake_answer(question.encode(), answer)

    def allocate(self, tensor: torch.Tensor) -> None:
        """Makes the storage of a tensor an allocation of the device."""
        storage = tensor.untyped_storage()
        self._library.fake_allocation(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))

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
    fake = load_runtime()
    read = tensor_table.tensor_row

    def row_on_device(tensor: torch.Tensor) -> list[int]:
        row = read(tensor)
        if row[2] == tensor_table.HOST_DEVICE and tensor.numel() > LEAST:
            row[2] = 2 + (device_of(tensor) << 32)
            fake.allocate(tensor)
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_table, "PLAIN_TYPES", ())  # so all are read in Python
        patch.setattr(tensor_table, "tensor_row", row_on_device)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=fake.streams[device]))
        patch.setattr(device_streams, "current_streams", lambda: {i: torch.cuda.current_stream(i) for i in (0, 1)})
        patch.setattr(
            record_reader, "is_host_memory", lambda tensor: tensor.numel() <= LEAST and is_host_memory(tensor)
        )
        patch.setattr(device_streams, "made_current", lambda streams: nullcontext())
        assert _C.copies_from_cuda(), device_info()
        yield fake
        assert fake.count("calls without a device") == fake.count("calls on another device") == 0
        assert fake.last_error() == 0, "the framework would find our error"


def copies_from_cuda() -> bool:
    """Whether the engine copies from devices itself."""
    return _C.copies_from_cuda()


def no_copies_from_cuda() -> Any:
    """A context in which the engine finds no CUDA, so that torch copies."""
    return mock.patch.object(_C, "copies_from_cuda", lambda *_: False)


def device_notes() -> list[str]:
    """What the engine tells of devices that it cannot use as it would."""
    return _C.device_notes()


def device_info() -> dict[str, Any]:
    """What the engine found of CUDA."""
    return _C.device_info()


def device_of(tensor: torch.Tensor) -> int:
    """The device that a large tensor counts as being on: that of its dtype's size, as views have it, too."""
    return int(tensor.itemsize == 2)


def neighbours(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of these dtypes and shapes, each with a storage of its own that begins where the one before ends."""
    memory, found, at = mmap.mmap(-1, sum(tensor.nbytes for tensor in tensors.values())), {}, 0
    for key, tensor in tensors.items():
        own = memoryview(memory)[at : at + tensor.nbytes]
        found[key] = torch.frombuffer(own, dtype=tensor.dtype).view(tensor.shape)
        at += tensor.nbytes
    return found


def load_runtime(other: bool = False) -> FakeCuda:
    """Loads the driver and a runtime, or a second, older runtime, as another library of the process may."""
    runtime = _load(_OTHER_RUNTIME if other else _RUNTIME)
    if not other:
        _load(_DRIVER)
    return FakeCuda(runtime)


def _load(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(library(name)), ctypes.RTLD_LOCAL)


def library(name: str = _RUNTIME) -> Path:
    """Builds a library, the runtime if no other is named, and returns its path."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    path = _BUILD / name
    newest = max(
        source.stat().st_mtime for source in (*_SOURCE.parent.iterdir(), *map(_CSRC.joinpath, _LANES), Path(__file__))
    )
    if not path.exists() or path.stat().st_mtime < newest:
        # The driver is what the runtime has of it: they share the state.
        source = (
            ["-I", str(_CSRC), str(_SOURCE)]
            if name != _DRIVER
            else ["-x", "c++", "/dev/null", "-Wl,--no-as-needed", f"-L{_BUILD}", f"-l:{_RUNTIME}"]
        )
        with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
            made = Path(folder) / name
            flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{name}", "-pthread"]
            compiler = os.environ.get("CXX", "g++")
            subprocess.run([compiler, *flags, *source, "-o", str(made)], check=True)
            made.replace(path)  # by whichever process is last
    return path
