"""`TorchSnapshot` is a snapshot that torch fills, of tensors on devices that the engine cannot copy from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._engine import _C
from .._engine.dtype_codes import dtype_code
from .._engine.rows import int_table
from .._engine.torch_copies import note_device
from ..errors import CheckpointError
from .host_batches import write_table

_GAP = 4096  # bytes between the addresses of two ranges


class TorchSnapshot:
    """Memory of the snapshots' arena for the last of these tensors, as many as the budget allows. Use it as
    `_C.Snapshot`. A tensor without gaps keeps its strides; others become contiguous."""

    def __init__(self, tensors: Sequence[torch.Tensor], budget: int, threads: int) -> None:
        table, address = int_table(), _GAP
        for tensor in tensors:
            # The engine lays out ranges by address and never reads them: each gets a range of its own.
            table.extend((dtype_code(tensor.dtype, ""), address, 1, tensor.numel(), 1))
            address += tensor.nbytes + _GAP
        self._memory = _C.Snapshot(table, budget, threads)
        self.first = self._memory.first  #: tensors before this one are not in the snapshot
        self._sources = list(tensors[self.first :])
        self._copies: list[torch.Tensor] = []

    def copy(self, key_of: Callable[[int], str]) -> None:
        """Returns when all is copied, behind what the current streams of the devices had queued. `key_of`: the key of
        one of the tensors, by its number, for errors."""
        for number, (source, offset) in enumerate(zip(self._sources, self._memory.offsets(), strict=True)):
            strides = torch.empty_like(source, device="meta").stride()
            target = torch.empty_strided(source.shape, strides, dtype=source.dtype, device="cpu")
            if source.numel() != 0:
                body = torch.frombuffer(self._memory, dtype=torch.uint8, count=source.nbytes, offset=offset)
                target = body.view(source.dtype).as_strided(source.shape, strides)
            self._copies.append(target)
            note_device(source.device.type)
            try:
                target.copy_(source)
            except RuntimeError as error:  # of the backend, as that it has no memory
                key = key_of(self.first + number)
                raise CheckpointError(f"{key}: {error}", key=key) from error
        self._sources.clear()

    def table(self) -> Any:
        return write_table(self._copies)

    def release(self) -> None:
        self._copies.clear()
        self._memory.release()
