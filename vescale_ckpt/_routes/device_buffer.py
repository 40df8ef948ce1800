"""Buffers of a broadcast load for targets on devices: files are read to host memory, messages go over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .._ranks.connections import Connections
from .._ranks.nccl import DeviceGroup
from ..errors import CheckpointError
from .pipeline import Buffers
from .routes import Round

_PAGE = 4096


class DeviceBuffer(Buffers):
    """This rank's buffers, one for each of `sizes` (bytes): on the host, each starting at a page, and on its device.

    All ranks exchange messages over their devices, and NCCL's group ends with the connections.
    """

    def __init__(self, sizes: Sequence[int], group: DeviceGroup) -> None:
        self._group = group
        self._device = group.device
        self._host = [_from_page(self._device.host_memory, size) for size in sizes]
        self._device.begin()
        with self._device.queued():
            self._on_device = [torch.empty(size, dtype=torch.uint8, device=self._device.device) for size in sizes]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._host[index % len(self._host)]

    def release(self) -> None:
        """Returns the memory to torch's allocators, which keep it for the next load."""
        del self._host, self._on_device

    def exchange_messages(self, peers: Connections, index: int, round_: Round) -> CheckpointError | None:
        """Copies a round's data from the host to the device, and sends and receives its messages there.

        Returns an error instead of raising it, because other ranks may still wait for this one; they learn of it after
        the round.
        """
        host, on_device = self[index], self._on_device[index % len(self._on_device)]
        nothing = on_device[:0]
        inputs, outputs = [nothing] * peers.size, [nothing] * peers.size
        for peer, offset, size in round_.messages(round_.sends):
            inputs[peer] = on_device[offset : offset + size]
        for peer, offset, size in round_.messages(round_.receives):
            outputs[peer] = on_device[offset : offset + size]
        try:
            with self._device.queued():
                for start, end in _not_received(round_):
                    on_device[start:end].copy_(host[start:end], non_blocking=True)
            self._group.swap(outputs, inputs)
        except CheckpointError as error:
            return error
        except Exception as error:
            return CheckpointError(f"the devices could not swap what they had read: {type(error).__name__}: {error}")
        return None

    def sources(self, index: int, round_: Round) -> dict[int, torch.Tensor]:
        """Returns the source buffers of the round's placements, by peer (-1: this rank)."""
        return {-1: self._on_device[index % len(self._on_device)]}

    @contextmanager
    def placing(self) -> Iterator[None]:
        """A context manager that queues copies out of the device's buffer, and waits for them at its end."""
        with self._device.queued():
            yield
        if not self._device.finish(self._group.seconds):
            raise CheckpointError(f"the device has not placed what it got within {self._group.seconds:g} s")


def _from_page(allocate: Callable[[int], torch.Tensor], size: int) -> torch.Tensor:
    memory = allocate(size)
    # Page-locked memory is page-aligned. One more page could make torch's allocator lock twice as much, permanently.
    if start := -memory.data_ptr() % _PAGE:
        memory = allocate(size + _PAGE)
        start = -memory.data_ptr() % _PAGE
    return memory[start : start + size]


def _not_received(round_: Round) -> list[tuple[int, int]]:
    """Returns the ranges of a round's buffer that are not received from other ranks."""
    parts, at = [], 0
    for _, offset, size in sorted(round_.messages(round_.receives), key=lambda message: message[1]):
        if offset > at:
            parts.append((at, offset))
        at = offset + size
    if round_.memory_bytes > at:
        parts.append((at, round_.memory_bytes))
    return parts
