"""Memory of the rounds of a load whose targets lie on devices: read into host memory, swapped from device to device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .._ranks.connections import Connections
from .._ranks.nccl import DeviceGroup
from ..errors import CheckpointError
from .routes import Round

_PAGE = 4096


class DeviceBuffer:
    """This rank's memories, one for each of `sizes`, on the host (each starts at a page) and on its device."""

    def __init__(self, sizes: Sequence[int], group: DeviceGroup) -> None:
        self._group = group
        self._device = group.device
        self._host = [_from_page(self._device.host_memory(size + _PAGE), size) for size in sizes]
        self._device.begin()
        with self._device.queued():
            self._there = [torch.empty(size, dtype=torch.uint8, device=self._device.device) for size in sizes]

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._host[number % len(self._host)]

    def meet(self, peers: Connections, near: Iterable[int]) -> CheckpointError | None:
        """There is nobody near: all go through their devices."""
        return None

    def close(self) -> None:
        """The devices' memory is nobody else's."""

    def let_go(self) -> None:
        """Torch keeps it for the next one."""
        del self._host, self._there

    def swap(self, peers: Connections, number: int, of: Round) -> CheckpointError | None:
        """Takes what the host has of a round to the device, and sends and receives its messages there. What went wrong
        is for all to be told later: others may still be waiting for this rank."""
        host, there = self[number], self._there[number % len(self._there)]
        nothing = there[:0]
        inputs, outputs = [nothing] * peers.size, [nothing] * peers.size
        for peer, offset, size in of.messages(of.sends):
            inputs[peer] = there[offset : offset + size]
        for peer, offset, size in of.messages(of.receives):
            outputs[peer] = there[offset : offset + size]
        try:
            with self._device.queued():
                for start, end in _not_received(of):
                    there[start:end].copy_(host[start:end], non_blocking=True)
            self._group.swap(outputs, inputs)
        except CheckpointError as error:
            return error
        except Exception as error:
            return CheckpointError(f"the devices could not swap what they had read: {type(error).__name__}: {error}")
        return None

    def swapped(self, number: int, of: Round) -> dict[int, torch.Tensor]:
        """By peer (-1: none), in what memory that lies which the round's places name."""
        return {-1: self._there[number % len(self._there)]}

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Copies out of the device's memory are queued, and done when it ends."""
        with self._device.queued():
            yield
        if not self._device.finish(self._group.seconds):
            raise CheckpointError(f"the device has not placed what it got within {self._group.seconds:g} s")

    def give_back(self, peers: Connections, of: Round) -> None:
        """Nobody looks at the memory of others."""


def _from_page(memory: torch.Tensor, size: int) -> torch.Tensor:
    start = -memory.data_ptr() % _PAGE
    return memory[start : start + size]


def _not_received(of: Round) -> list[tuple[int, int]]:
    """The parts of a round's memory that do not come from others."""
    parts, at = [], 0
    for _, offset, size in sorted(of.messages(of.receives), key=lambda message: message[1]):
        if offset > at:
            parts.append((at, offset))
        at = offset + size
    if of.memory_bytes > at:
        parts.append((at, of.memory_bytes))
    return parts
