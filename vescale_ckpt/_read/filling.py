"""Fills tensors from records for one load: in place where the engine can, else by a copy through host memory."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import settings
from .._engine.dtypes import CODE_DTYPES, dtype_code
from .._engine.options import threads_of
from .._engine.overlap import GROUP_TENSORS, overlap
from .._engine.rows import int_table
from .._engine.tensor_checks import can_be_filled, holds_any, is_host_memory, overlapping
from .._engine.torch_private import bump_versions
from .._state.describe import Description
from .._write.optimizer_gate import wait_until_copied
from ..errors import CheckpointError, IncompatibleStateError
from ..reports import LoadStats
from .records import Record, RecordReader


@dataclass(slots=True)
class Target:
    """A tensor to fill, and its record. `host`: the memory that the engine fills, the tensor itself where it can."""

    record: Record
    storage_offset: Sequence[int]
    lengths: Sequence[int]
    tensor: torch.Tensor
    host: torch.Tensor
    name: str  #: its key in the state, for errors
    commit: Callable[[torch.Tensor], object] | None = None  #: called when the tensor is filled


@dataclass
class _Group:
    """Tensors that are read together, and their rows in the engine's table."""

    targets: list[Target] = field(default_factory=list)
    table: array[int] = field(default_factory=int_table)


class FailedElsewhereError(Exception):
    """Another rank raises an error, so this rank's load ends early."""


class Filling:
    """The tensors that one load fills, and the records that they are filled from."""

    def __init__(self, records: RecordReader) -> None:
        self.records = records
        self.options = records.options
        self._filled: list[torch.Tensor] = []

    def run(self, work: Callable[[], tuple[int, int]]) -> LoadStats:
        """Runs `work`, which does all of a load and returns how many tensors and objects it read.

        If it raises `FailedElsewhereError`, this returns without an error, with an incomplete load: the rank that
        failed raises.
        """
        started = time.perf_counter()
        tensors = objects = 0
        try:
            with suppress(FailedElsewhereError):
                tensors, objects = work()
                self.records.check_unchanged()
        finally:
            filled, self._filled = self._filled, []
            bump_versions(filled)
        return self.records.stats(time.perf_counter() - started, tensors, objects)

    def begin(self, description: Description | None, state: object) -> None:
        """Prepares the description's tensors and the DTensors of `state`. Called before the first byte is loaded.

        Torch's version counters of the tensors are raised now and at the load's end, so that code that compares them
        notices the change. Waits until an asynchronous save has copied the tensors.
        """
        tensors = [] if description is None else description.tensors
        if description is not None and (bad := overlapping(tensors)):
            items = range(len(description.names))
            raise overlaps_itself(
                next(description.names[item] for item in items if description.tensor_number(item) == bad[0])
            )
        phase = f"loading {self.records.where}: wait until a save has copied the state"
        wait_until_copied(phase, settings.timeout(self.options.timeout))
        self._filled += tensors
        if isinstance(state, dict) and holds_any(state, DTensor):  # a DTensor has a version counter of its own
            self._filled += [value for value in state.values() if isinstance(value, DTensor)]
        bump_versions(self._filled)

    def target(
        self,
        record: Record,
        storage_offset: Sequence[int],
        lengths: Sequence[int],
        tensor: torch.Tensor,
        name: str,
        commit: Callable[[torch.Tensor], object] | None = None,
    ) -> Target:
        host = tensor
        if tensor.dtype != record.dtype or not is_host_memory(tensor):
            if not can_be_filled(tensor):
                raise CheckpointError(
                    f"{record.key}: the tensor to load into has no memory: its storage was freed or is too small"
                )
            host = torch.empty(tensor.shape, dtype=record.dtype, device="cpu")
        return Target(record, storage_offset, lengths, tensor, host, name, commit)

    def fill(self, targets: Iterator[Target], *, through_cache: bool = False) -> None:
        """Fills the targets in groups: while the engine reads one, the next is prepared."""

        def read(group: _Group) -> dict[str, Any]:
            return self.records.read_tensors(
                group.table, lambda row: group.targets[row].record.key, through_cache=through_cache
            )

        for group, report in overlap(_groups(targets), read):
            self.records.count(report)
            for row in report["unread"]:
                self.fill_from_archive(group.targets[row])
            for target in group.targets:
                if target.host is not target.tensor:
                    target.tensor.copy_(target.host)
                if target.commit is not None:
                    target.commit(target.tensor)
            bump_versions([target.tensor for target in group.targets])

    def fill_from_archive(self, target: Target) -> None:
        """Fills a target's host memory from a record that the engine left unread."""
        record = target.record
        tensor = self.records.tensor_in(record, target.host.nbytes)
        if tensor.dtype != record.dtype and not self.options.allow_cast:
            raise IncompatibleStateError(target.name, f"dtype {record.dtype}", f"dtype {tensor.dtype}")
        for dim, (start, length) in enumerate(zip(target.storage_offset, target.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target.host.copy_(tensor)

    # --- Reads for other ranks: the `PieceReader` of a broadcast load's rounds

    @property
    def threads(self) -> int:
        return threads_of(self.options.thread_count)

    def read_pieces(self, table: bytes, key_of: Callable[[int], str]) -> list[int]:
        report = self.records.read_tensors(table, key_of)
        self.records.count(report, for_others=True)
        return list(report["unread"])

    def read_piece_from_archive(
        self, key: str, record: Sequence[int], sizes: Sequence[int], start: Sequence[int], piece: torch.Tensor
    ) -> None:
        file, offset, length, crc, code = record
        stored = Record(key, file, offset, length, crc, CODE_DTYPES[code], sizes)
        self.fill_from_archive(Target(stored, start, piece.shape, piece, piece, key))


def overlaps_itself(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: several elements of the tensor to load into are the same memory (it is expanded, or overlaps itself): "
        "load into a clone of it",
        key=key,
    )


def _groups(targets: Iterator[Target]) -> Iterator[_Group]:
    """Cuts the targets into groups, by number, and by the bytes of host memory for targets that are not filled in
    place. Two groups hold such memory at a time."""
    budget = settings.number("arena_bytes") // 2
    group, held = _Group(), 0
    for target in targets:
        record, host = target.record, target.host
        code = dtype_code(record.dtype, record.key)
        group.table.extend(
            (record.file, record.offset, record.length, record.crc, code, len(record.sizes), *record.sizes)
        )
        group.table.extend((*target.storage_offset, *target.lengths, host.data_ptr(), *host.stride()))
        group.targets.append(target)
        if host is not target.tensor:
            held += host.nbytes
        if held >= budget or len(group.targets) == GROUP_TENSORS:
            yield group
            group, held = _Group(), 0
    if group.targets:
        yield group
