"""NCCL among ranks that each have a CUDA device of their own: swaps of bytes from device to device, in bounded time.

A communicator of its own, made beside the user's groups as `Connections` are, and for the same reasons. What goes wrong
in it is found out over those: a rank that waits in vain gives up here, and asks there who is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._engine.torch_private import Store
from ..errors import CheckpointError
from .node import node_of_this_process

MOST_SECONDS = 120.0  # that one swap may take: a dead peer would otherwise be waited for as long as for a late one
_PAUSE = 0.0002


class Device(Protocol):
    """What a swap takes of a kind of device."""

    device: torch.device

    def host_memory(self, size: int) -> torch.Tensor:
        """Bytes from which copies to the device run asynchronously."""

    def identity(self) -> str:
        """Equal for ranks that have the same device."""

    def begin(self) -> None:
        """What is queued from now on comes behind what the caller's stream has queued."""

    def queued(self) -> AbstractContextManager[None]:
        """Work is queued on a stream of ours, by any thread."""

    def finish(self, seconds: float) -> bool:
        """Whether all that was queued is done within so many seconds."""


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
    """The ranks of an exchange, each with its device. All of them make it together, and take each swap together."""

    def __init__(self, device: Device, backend: Any, timeout: float) -> None:
        self.device = device
        self.usable = True
        self._backend = backend
        self.seconds = min(timeout, MOST_SECONDS)  #: that one step on the device may take

    def swap(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Sends `inputs[i]` to rank i and fills `outputs[i]` with what it sends: bytes on the device, perhaps none.

        Raises `CheckpointError` if that is not done in time, and from then on.
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

    def end(self) -> None:
        self.usable = False
        self._backend.abort()


def nccl_backend(store: Store, rank: int, size: int, timeout: float) -> Any:
    """Connects at the first swap."""
    options = dist.ProcessGroupNCCL.Options()
    # Its watchdog ends the process when this is over: we give up before.
    options._timeout = timedelta(seconds=min(timeout, MOST_SECONDS) + 600)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def device_for(tensors: Sequence[torch.Tensor]) -> Device | None:
    """The CUDA device on which most of their bytes lie, or the current one if there are none of them. None if they
    lie elsewhere or on several, or there is no NCCL."""
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
