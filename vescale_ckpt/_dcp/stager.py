"""`Stager` copies the state for `dcp.async_save` into the snapshot memory of this package's asynchronous saves."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from .._engine import _C, torch_private
from .._engine.device_streams import new_snapshot
from .._engine.dtype_codes import DTYPE_CODES, dtype_code
from .._engine.gc import gc_paused
from .._engine.options import threads_of
from .._engine.rows import int_table
from .._engine.tensor_checks import as_host_tensor, is_plain_tensor
from .._engine.torch_copies import device_notes
from .._engine.wrapper_tensors import any_wrapper, map_inner
from .._state.chunks import Chunks, chunks_to_write, tells_chunks
from .._state.tensor_table import NOT_READY, device_number, read_tensors
from .._state.watch import local_parts, watch_values
from .._write import snapshot_budget
from .._write.host_batches import write_table
from ..errors import CheckpointError
from .packed_lists import item_of_chunk

_Path = tuple[Any, ...]  # where a tensor is in a state


class StagedChunks(torch.Tensor):
    """The copy of a tensor that reports its own chunks. The report is stored, because the tensor's methods may hold the
    original tensors, and processes of `dcp.async_save` receive tensors without instance attributes."""

    told: Chunks

    @classmethod
    def of(cls, told: Chunks) -> StagedChunks:
        staged = torch.empty(0, device="cpu").as_subclass(cls)
        staged.told = told
        return staged

    def __create_write_items__(self, key: str, value: object) -> list[WriteItem]:
        chunks = zip(self.told.chunks, self.told.tensors, strict=True)
        return [item_of_chunk(key, chunk, tensor.dtype, self.told.shape) for chunk, tensor in chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.told.at(index)


class Stager(AsyncStager):
    """Copies a state in parallel into memory that later saves reuse. Copies of tensors that share memory share it, too.

    With `dcp.async_save(state, async_stager=Stager(), storage_writer=…)`, the copy is complete when `async_save`
    returns, and its memory is released when the save is done.

    Args:
        budget_bytes: maximum bytes for snapshots in this process; None: `VESCALE_CKPT_SNAPSHOT_BYTES`.
    """

    def __init__(self, *, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 1:
            raise ValueError(f"budget_bytes: expected at least 1, got {budget_bytes}")
        self.budget_bytes = budget_bytes

    @gc_paused()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in host memory. `dcp.async_save` calls it on each rank, before it returns.

        Raises `CheckpointError` with the key of a tensor that cannot be copied or changed meanwhile. Raises it, too, if
        the budget is too small. `vescale_ckpt.save` can still save such a state: it copies only what a rank writes, and
        does not need memory for all of it at once.
        """
        values: dict[int, torch.Tensor | ShardedTensor] = {}  # {id: value}
        keys: dict[int, _Path] = {}
        for path, value in _tensors(state_dict):
            values.setdefault(id(value), value)
            keys.setdefault(id(value), path)
        watch = watch_values((_text(keys[number]), value) for number, value in values.items())
        known: dict[int, Any] = {}  # the copy of each tensor, as memo for the deep copy of the containers
        told = {
            number: chunks
            for number, value in values.items()
            if tells_chunks(value, loading=False)
            and (chunks := chunks_to_write(_text(keys[number]), value)) is not None
        }
        parts = {
            number: told[number].tensors if number in told else local_parts(value) for number, value in values.items()
        }
        found = [part for of_value in parts.values() for part in of_value]
        flags = iter(read_tensors(found).ready)
        ready: list[int] = []
        for number, of_value in list(parts.items()):
            ready_parts = [next(flags) for _ in of_value]
            try:
                parts[number] = [
                    part if flag != NOT_READY else as_host_tensor(part)[0]
                    for part, flag in zip(of_value, ready_parts, strict=True)
                ]
            except Exception as error:  # a subclass may do anything
                if any(_is_without_memory(part) for part in of_value):
                    key = _text(keys[number])
                    raise CheckpointError(f"{key}: {error}", key=key) from None
                # Planning decides whether the tensor can be saved, and raises its key if not.
                try:
                    known[number] = _copy_of(values[number])
                except Exception:
                    key = _text(keys[number])
                    raise CheckpointError(
                        f"{key}: a {type(values[number]).__name__} cannot be copied: {error}", key=key
                    ) from error
                del parts[number]
            else:
                ready += ready_parts
            for part in parts.get(number, ()):
                if part.dtype not in DTYPE_CODES:
                    dtype_code(part.dtype, _text(keys[number]))  # raises
        device_notes()  # logs new ones
        staged = iter(self._copied([part for of_value in parts.values() for part in of_value], ready))
        watch.check_unchanged()
        for number, of_value in parts.items():
            own = [next(staged) for _ in of_value]
            known[number] = (
                StagedChunks.of(told[number]._replace(tensors=own)) if number in told else _like(values[number], own)
            )
        return copy.deepcopy(state_dict, known)

    def synchronize_staging(self) -> None:
        """Does nothing: the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Releases the memory that no save uses."""
        _C.trim_snapshots()

    def _copied(self, sources: list[torch.Tensor], ready: list[int]) -> list[torch.Tensor]:
        devices = int_table(list(map(device_number, ready)))
        budget = snapshot_budget.snapshot_bytes() if self.budget_bytes is None else self.budget_bytes
        snapshot = new_snapshot(write_table(sources), devices, budget, threads_of())
        if snapshot.first:
            needed = sum(tensor.nbytes for tensor in sources)
            raise CheckpointError(
                f"a snapshot of {needed:,} bytes does not fit the {budget:,} that snapshots may take in this process "
                "(VESCALE_CKPT_SNAPSHOT_BYTES, or the stager's budget_bytes)",
                needed=needed,
                budget=budget,
            )
        snapshot.copy()
        return [
            torch.frombuffer(snapshot, dtype=source.dtype, count=source.numel(), offset=offset).view(source.shape)
            if source.numel()
            else torch.empty(source.shape, dtype=source.dtype, device="cpu")
            for source, offset in zip(sources, snapshot.offsets(), strict=True)
        ]


def _tensors(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, torch.Tensor | ShardedTensor]]:
    if isinstance(value, (torch.Tensor, ShardedTensor)):
        yield path, value
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    for name, item in inside:
        yield from _tensors(item, (*path, name))


def _text(path: _Path) -> str:
    return ".".join(map(str, path))


def _is_without_memory(part: torch.Tensor) -> bool:
    """Whether a plain tensor that cannot be copied has no memory (its storage was freed)."""
    return is_plain_tensor(part) and not part.is_meta and part.layout is torch.strided


def _copy_of(value: torch.Tensor | ShardedTensor) -> torch.Tensor | ShardedTensor:
    if isinstance(value, torch.Tensor) and any_wrapper(parts := local_parts(value)):
        (part,) = parts
        copied = map_inner(part, lambda inner: inner.detach().clone())
        return torch_private.dtensor_over(copied, value) if isinstance(value, DTensor) else copied
    return value.detach().clone()


def _like(value: torch.Tensor | ShardedTensor, parts: list[torch.Tensor]) -> torch.Tensor | ShardedTensor:
    if isinstance(value, ShardedTensor):
        shards = [Shard(part, shard.metadata) for part, shard in zip(parts, value.local_shards(), strict=True)]
        return torch_private.sharded_tensor_over(shards, value)
    (part,) = parts
    if isinstance(value, DTensor):
        return torch_private.dtensor_over(part, value)
    return part.requires_grad_(value.requires_grad)
