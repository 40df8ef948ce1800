"""Orders the engine's copies after the work of the training thread, by the streams that are current there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .. import settings
from ..errors import CheckpointError
from . import _C
from .rows import NO_LIMIT

#: The streams of the training thread: on each CUDA device, by its number, or on each device of another kind.
Streams = Mapping[Any, Any]


def copies_from_cuda() -> bool:
    """Whether the engine copies from and to CUDA devices. Starts CUDA if it can be used."""
    if torch.version.hip is not None:  # torch calls devices of ROCm "cuda", too
        return False
    return _C.copies_from_cuda(bool(settings.number("copy_batches")))


def current_streams() -> Streams:
    """The streams that are current on this thread. Starts no device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {number: torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())}
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "mps":
        return {}
    is_in_use = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    if not is_in_use():
        return {}
    devices = [torch.device(device.type, number) for number in range(torch.accelerator.device_count())]
    return {device: torch.accelerator.current_stream(device) for device in devices}


def producers(devices: Any, stream_of: Callable[[int], Any]) -> list[tuple[int, int]]:
    """For the engine: the device and the stream of each device that occurs in `devices`, the table of a device for each
    row; -1 is host memory."""
    if not bytes(devices).strip(b"\xff"):  # all are -1
        return []
    numbers = {device for device in memoryview(devices).cast("B").cast("q") if device >= 0}
    return [(number, int(stream_of(number).cuda_stream)) for number in sorted(numbers)]


def new_snapshot(table: Any, devices: Any, budget: int, threads: int) -> _C.Snapshot:
    """An unfilled snapshot of the rows of a table. `devices`: the device of each row; empty if all are in host memory.

    The copies run after the work that the current streams of the devices have queued when the copies start.
    """
    return _C.Snapshot(table, budget, threads, devices, producers(devices, torch.cuda.current_stream))


def filled_snapshot(table: Any, devices: Any, threads: int) -> _C.Snapshot:
    """A snapshot that holds copies of all rows. Raises `CheckpointError` if there is no memory for them."""
    snapshot = new_snapshot(table, devices, NO_LIMIT, threads)
    if snapshot.first:
        raise CheckpointError(f"the system has no memory to copy {snapshot.bytes:,} bytes from a device to")
    snapshot.copy()
    return snapshot


@contextmanager
def made_current(streams: Streams) -> Iterator[None]:
    """A context in which the streams are current on this thread, whichever that is."""
    with ExitStack() as stack:
        for device, stream in streams.items():
            stack.enter_context(torch.cuda.stream(stream) if isinstance(device, int) else stream)
        yield
