"""Swaps bytes between the CUDA devices of ranks by NCCL, in bounded time, for broadcast loads.

Each rank has a CUDA device of its own. The communicator is not made by `new_group`, for the reasons that
`connections.py` gives. A swap that exceeds its time raises here; the next collective on `Connections` finds out which
rank is gone.

Torch's watchdog thread is off. It answers an error with a key in the store of the whole job, and minutes later the
monitors of the user's own groups end their processes. So this module polls for errors itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._engine.torch_private import Store
from ..errors import CheckpointError
from .node import node_of_this_process
from .store_thread import in_time

logger = logging.getLogger(__name__)

MOST_SECONDS = 120.0  # one swap may take so long: NCCL cannot always distinguish a dead peer from a late one
ABORT_SECONDS = 30.0
_MOST_CHANNELS = 8  # NCCL itself would take up to 32, with buffers of several MiB for each peer
_PAUSE = 0.0002


class CudaDevice:
    """The operations of a device that swaps use. Tests have others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, size: int) -> torch.Tensor:
        """Returns a tensor of bytes from which copies to the device run asynchronously."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def identity(self) -> str:
        """Returns a text that is equal on ranks that have the same device."""
        properties = torch.cuda.get_device_properties(self.device)
        return f"{node_of_this_process()} {getattr(properties, 'uuid', self.device.index)}"

    def begin(self) -> None:
        """Orders all work that is queued from now on after the work in the caller's current stream. Raises
        CheckpointError if that stream is being captured."""
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CheckpointError(
                    f"a CUDA graph is being captured in the current stream of {self.device}: load before or after that"
                )
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def queued(self) -> Iterator[None]:
        """A context in which any thread queues work on this object's own stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def finish(self, seconds: float, swap: Any = None) -> bool:
        """Waits for the queued work, at most `seconds`. Returns whether it is done. `swap`: torch's `Work` if a swap is
        part of the work. Raises CheckpointError as soon as NCCL reports that the swap fails."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        deadline = time.monotonic() + seconds
        while not event.query():  # type: ignore[no-untyped-call]
            if swap is not None:
                _raise_error_of(swap)
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True


def _raise_error_of(swap: Any) -> None:
    # `is_completed` asks NCCL. `Work.exception` has the text, but torch 2.11 cannot return it to Python.
    if swap.is_completed() and (result := swap.get_future_result()).done() and result.value() != _SUCCESS:
        raise CheckpointError("NCCL reports that a connection among the devices failed; torch has logged its error")


class DeviceGroup:
    """Connects the devices of all ranks of an exchange, one a rank. All ranks make it and call each swap together."""

    def __init__(self, device: CudaDevice, backend: Any, timeout: float) -> None:
        self.device = device
        self.usable = True
        self.seconds = min(timeout, MOST_SECONDS)  #: the limit of one step on the device
        self._connecting_seconds = _connecting_seconds(timeout)
        self._backend = backend
        self._lock = threading.Lock()
        self._connecting = False  # whether a thread is in the connecting call: then only that thread may abort

    def swap(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Sends `inputs[i]` to rank i and fills `outputs[i]` with the bytes from rank i. All are tensors of bytes on
        the device, and may be empty.

        Raises `CheckpointError` if it takes longer than `seconds`. After that every swap raises.
        """
        if not self.usable:
            raise CheckpointError("the connection among the devices has failed before")
        try:
            self._swap(outputs, inputs)
        except BaseException:
            self.end()
            raise

    def connect(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Makes the first `swap`. NCCL connects in this call, which waits even for dead ranks and cannot be
        interrupted. So a new thread makes the call. If the call does not return in time, the thread is abandoned.

        Raises `CheckpointError` after half the timeout: ranks that failed at once wait for the result of this rank.
        """
        seconds = self._connecting_seconds
        try:
            in_time(partial(self._connect, outputs, inputs), seconds, "vescale_ckpt connecting devices")
        except TimeoutError as late:
            self.end()
            raise CheckpointError(f"the devices of the ranks did not connect within {seconds:g} s") from late
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends the connections and returns their memory. Any thread may call it, several times. Waits at most
        `ABORT_SECONDS`. Does not wait for a connecting call: its thread ends the connections when the call returns."""
        with self._lock:
            ended, self.usable = not self.usable, False
            if ended or self._connecting:
                return
        seconds = min(ABORT_SECONDS, self.seconds / 4)  # other ranks wait for this one
        try:
            in_time(self._abort, seconds, "vescale_ckpt abort")
        except TimeoutError:
            logger.warning("the connections among devices have not ended within %g s", seconds)
        except RuntimeError:  # the interpreter is ending and starts no threads
            self._abort()

    def _swap(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        with self.device.queued():
            work = self._backend.alltoall([*outputs], [*inputs])
            work.block_current_stream()  # `wait` would block the host for up to 10 minutes
        if not self.device.finish(self.seconds, work):
            raise CheckpointError(f"the devices of the ranks did not swap their bytes within {self.seconds:g} s")

    def _connect(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        with self._lock:
            if not self.usable:
                return
            self._connecting = True
        try:
            self._swap(outputs, inputs)
        finally:
            with self._lock:
                self._connecting = False
                left_behind = not self.usable
            if left_behind:
                self._abort()

    def _abort(self) -> None:
        try:
            with _environment({_EXTRA_DUMP: "0"} if _EXTRA_DUMP in os.environ else {}):
                self._backend.abort()
        except Exception as error:
            logger.warning("the connections among devices have not ended: %s", error)

    def __del__(self) -> None:
        with suppress(Exception):
            self.end()


def nccl_backend(store: Store, rank: int, size: int, timeout: float) -> Any:
    """Returns an NCCL process group, which connects at its first swap. `store`: a client that nobody else uses; its
    timeout is set."""
    store.set_timeout(timedelta(seconds=_connecting_seconds(timeout)))  # it bounds the wait for NCCL's unique id
    options = dist.ProcessGroupNCCL.Options()
    # The group blocks even if the user's groups do not: an abort cannot interrupt a call that waits for communicators.
    options.config.blocking = 1
    options.config.max_ctas = _MOST_CHANNELS
    with _environment(_GROUP_ENVIRONMENT):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _connecting_seconds(timeout: float) -> float:
    return min(timeout / 2, MOST_SECONDS)


# Torch reads these variables when it makes a process group. With blocking waits it makes no watchdog and no monitor.
# Events of the cache live longer than their swaps: torch's flight recorder reads them until a watchdog reports their
# end.
_GROUP_ENVIRONMENT = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_CUDA_EVENT_CACHE": "1"}
# If this variable is set, `abort` tells the monitors of all groups to end their processes.
_EXTRA_DUMP = "TORCH_NCCL_EXTRA_DUMP_ON_EXEC"
_SUCCESS = 0  # torch's `WorkResult.SUCCESS`


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def device_for(tensors: Sequence[torch.Tensor]) -> CudaDevice | None:
    """Returns the CUDA device that holds most bytes of `tensors`, or the current device if there are no tensors. None
    if most bytes are in host memory or on several devices, or if NCCL is missing."""
    if not (dist.is_nccl_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
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
