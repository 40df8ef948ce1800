"""Swaps bytes between the CUDA devices of ranks by NCCL, in bounded time, for broadcast loads.

Each rank has a CUDA device of its own. The communicator is not made by `new_group`, for the reasons that
`connections.py` gives. A swap that exceeds its time raises here; the next collective on `Connections` finds out which
rank is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._engine.torch_private import Store
from ..errors import CheckpointError
from .node import node_of_this_process

logger = logging.getLogger(__name__)

MOST_SECONDS = 120.0  # for one swap: NCCL cannot tell a dead peer from a late one
ABORT_SECONDS = 30.0
_MOST_CHANNELS = 8  # NCCL's own choice is up to 32, with buffers of several MiB for each peer
_PAUSE = 0.0002


class Device(Protocol):
    """The operations of a device that swaps use."""

    device: torch.device

    def host_memory(self, size: int) -> torch.Tensor:
        """A tensor of bytes from which copies to the device run asynchronously."""

    def identity(self) -> str:
        """A text that is equal on ranks that have the same device."""

    def begin(self) -> None:
        """Orders all work that is queued from now on after the work in the caller's current stream."""

    def queued(self) -> AbstractContextManager[None]:
        """A context in which any thread queues work on this object's own stream."""

    def finish(self, seconds: float) -> bool:
        """Waits for the queued work, at most `seconds`. Returns whether it is done."""


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def identity(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return f"{node_of_this_process()} {getattr(properties, 'uuid', self.device.index)}"

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def queued(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def finish(self, seconds: float) -> bool:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        deadline = time.monotonic() + seconds
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True


class DeviceGroup:
    """The devices of all ranks of an exchange, one a rank. All ranks make it together and call each swap together."""

    def __init__(self, device: Device, backend: Any, timeout: float) -> None:
        self.device = device
        self.usable = True
        self._backend = backend
        self._lock = threading.Lock()
        self.seconds = min(timeout, MOST_SECONDS)  #: the limit of one step on the device

    def swap(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Sends `inputs[i]` to rank i and fills `outputs[i]` with the bytes from rank i. Tensors of bytes on the
        device, which may be empty.

        Raises `CheckpointError` if it takes longer than `seconds`. After that every swap raises.
        """
        if not self.usable:
            raise CheckpointError("the connection among the devices has failed before")
        try:
            with self.device.queued():
                self._backend.alltoall([*outputs], [*inputs]).wait()
            if self.device.finish(self.seconds):
                return
        except BaseException:
            self.end()
            raise
        self.end()
        raise CheckpointError(f"the devices of the ranks did not swap their bytes within {self.seconds:g} s")

    def connect(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """The first `swap`. NCCL connects in the call itself, which waits for ranks that died: it is aborted after
        `seconds`."""
        late = threading.Timer(self.seconds, self.end)
        late.daemon = True
        late.start()
        try:
            self.swap(outputs, inputs)
        finally:
            late.cancel()
        if not self.usable:
            raise CheckpointError(f"the devices of the ranks did not connect within {self.seconds:g} s")

    def end(self) -> None:
        """Ends the connections and returns their memory. Any thread may call it, and again. Waits at most
        `ABORT_SECONDS`."""
        with self._lock:
            if not self.usable:
                return
            self.usable = False
        aborting = threading.Thread(target=self._backend.abort, name="vescale_ckpt abort", daemon=True)
        try:
            aborting.start()
        except RuntimeError:  # at its end the interpreter starts no threads
            self._backend.abort()
            return
        aborting.join(ABORT_SECONDS)
        if aborting.is_alive():
            logger.warning("the connections among devices have not ended within %g s", ABORT_SECONDS)

    def __del__(self) -> None:
        with suppress(Exception):
            self.end()


def nccl_backend(store: Store, rank: int, size: int, timeout: float) -> Any:
    """An NCCL process group, which connects at its first swap."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=min(timeout, MOST_SECONDS) + 600)  # of work that nobody waits for any more
    options.config.blocking = 0  # so that another thread can abort a call
    options.config.max_ctas = _MOST_CHANNELS
    # torch's watchdog would end the process when a peer dies. Swaps raise, and the training decides what to do.
    with _environment(_ERROR_HANDLING, "0"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a process group is made


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def device_for(tensors: Sequence[torch.Tensor]) -> Device | None:
    """The CUDA device that holds most bytes of `tensors`, or the current one if there are no tensors. None if most
    bytes are in host memory, if they are on several devices, or without NCCL."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
    devices = [device for device in sizes if device.type == "cuda"]
    if not sizes:
        devices = [torch.device("cuda", torch.cuda.current_device())]
    if len(devices) != 1 or 2 * sizes.get(devices[0], 0) < sum(sizes.values()):
        return None
    return CudaDevice(devices[0])
