"""Orders the engine's copies after the work of the training thread, by the streams that are current there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .. import settings
from . import _C

#: The stream of the training thread on each CUDA device.
Streams = Mapping[int, Any]


def copies_from_cuda() -> bool:
    """Whether the engine copies from and to CUDA devices. Starts CUDA if it can be used."""
    return _C.copies_from_cuda(bool(settings.number("copy_batches")))


def current_streams() -> Streams:
    """The streams that are current on this thread. Starts CUDA nowhere."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {number: torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())}


def producers(devices: Any, stream_of: Callable[[int], Any]) -> list[tuple[int, int]]:
    """For the engine: the device and the stream of each device that occurs in `devices`, the table of a device for each
    row; -1 is host memory."""
    if not bytes(devices).strip(b"\xff"):  # all are -1
        return []
    numbers = {device for device in memoryview(devices).cast("B").cast("q") if device >= 0}
    return [(number, int(stream_of(number).cuda_stream)) for number in sorted(numbers)]


@contextmanager
def made_current(streams: Streams, devices: Iterable[int]) -> Iterator[None]:
    """A context in which the streams of these devices are current on this thread, whichever that is."""
    with ExitStack() as stack:
        for number in devices:
            stack.enter_context(torch.cuda.stream(streams[number]))
        yield
