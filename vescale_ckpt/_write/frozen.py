"""`FrozenTensors` remembers what tensors hold that are promised not to change, so that saves need not read them.

Torch's version counter alone does not prove that a tensor is unchanged: fused optimizers, running statistics of batch
normalization, `.data` and numpy change memory and leave it. So only tensors count that the caller of `save` names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._engine.rows import PLAN_ROW, words
from .._engine.torch_private import storage_identity, versions
from .._plan.save_plan import PackedItems
from .._state.shared_memory import sharing_memory
from .._state.tensor_table import NOT_READY
from .._state.watch import local_parts, tensors_of
from ..errors import CheckpointError
from .host_batches import samples_of


class Content(NamedTuple):
    """What a box of a tensor holds."""

    id: bytes
    crc: int


class _Remembered(NamedTuple):
    storage: StorageWeakRef
    versions: tuple[int, ...]  # one for each named tensor in that storage
    sample: int  # hash of some elements; 0: none was taken
    content: Content


class FrozenContents:
    """What boxes of frozen tensors held when they were read last. Keeps no tensor alive. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, bytes, bytes], _Remembered] = {}

    def find(self, storage: int, seed: bytes, place: bytes, versions: tuple[int, ...]) -> _Remembered | None:
        """What is known of a box of a storage with that identity, unless the storage is gone or a version differs."""
        with self._lock:
            found = self._known.get((storage, seed, place))
        if found is None or found.versions != versions or _is_gone(found.storage):
            return None
        return found

    def remember(self, storage: int, seed: bytes, place: bytes, found: _Remembered) -> None:
        with self._lock:
            self._known[storage, seed, place] = found

    def forget_dead(self) -> None:
        with self._lock:
            self._known = {key: found for key, found in self._known.items() if not _is_gone(found.storage)}


class FrozenTensors:
    """The tensors that the caller of one save names. Made before the save describes the state, so that a change in
    between counts as one that came later.

    `trained`: other tensors of the state, by name. Raises TypeError for what is no tensor, ValueError for a tensor that
    training may change: it requires grad, or is the memory of a trained tensor that does (`.data`, `state_dict()`).
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], contents: FrozenContents, trained: Mapping[str, torch.Tensor]
    ) -> None:
        self._contents = contents
        self._versions: dict[int, tuple[int, ...]] = {}  # {identity of the storage: versions}
        self._storages: dict[int, StorageWeakRef] = {}
        # By row: storage, place and sample of boxes that the save has to read.
        self._unread: dict[int, tuple[int, bytes, int]] = {}
        named: list[torch.Tensor] = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"frozen: expected tensors, got {type(tensor).__name__}")
            if tensor.requires_grad:
                raise ValueError("frozen: a tensor that requires grad is among them: training changes it")
            for part in local_parts(tensor):
                named.append(part)
                self._add(part, versions(tensors_of(tensor)))
        contents.forget_dead()
        _refuse_trained(named, trained)

    def _add(self, part: torch.Tensor, counters: Sequence[int]) -> None:
        try:
            storage = part.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse tensors: they are read each time
            return
        identity = storage_identity(storage)
        self._versions[identity] = (*self._versions.get(identity, ()), *counters)
        self._storages[identity] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def contents(self, items: PackedItems, seed: bytes) -> dict[int, Content]:
        """By row of a rank's part what is remembered of it. Raises `CheckpointError` that names a tensor of which some
        elements have changed: nothing is known of the others then."""
        if not self._versions:
            return {}
        description, plan = items.description, words(items.local_plan)
        rows, storages = [], []
        for row in range(items.count_tensors()):
            index = description.tensor_index(plan[row * PLAN_ROW])
            if description.ready[index] != NOT_READY:
                identity = storage_identity(description.tensors[index])
                if identity in self._versions:
                    rows.append(row)
                    storages.append(identity)
        found: dict[int, Content] = {}
        table, devices = items.copy_table(rows)
        for row, storage, place, sample in zip(
            rows, storages, table_rows(table), samples_of(table, devices), strict=True
        ):
            counters = self._versions[storage]
            known = self._contents.find(storage, seed, place.tobytes(), counters) if -1 not in counters else None
            if known is None:
                self._unread[row] = storage, place.tobytes(), sample
            elif known.sample == sample:
                found[row] = known.content
            else:
                key = description.names[plan[row * PLAN_ROW]]
                raise CheckpointError(
                    f"{key}: frozen= names it, but its values have changed since an earlier save, and nothing has "
                    "raised torch's version counter. Name only tensors that nothing changes: not those of state_dict() "
                    "or .data of what is trained",
                    key=key,
                )
        return found

    def was_read(self, row: int, seed: bytes, content: Content) -> None:
        """Notes what a row holds that `contents` did not know."""
        if row in self._unread:
            storage, place, sample = self._unread[row]
            found = _Remembered(self._storages[storage], self._versions[storage], sample, content)
            self._contents.remember(storage, seed, place, found)


def _refuse_trained(named: list[torch.Tensor], trained: Mapping[str, torch.Tensor]) -> None:
    parts: dict[tuple[str, int], torch.Tensor] = {("", number): part for number, part in enumerate(named)}
    for name, tensor in trained.items():
        if tensor.requires_grad:
            parts.update({(name, number): part for number, part in enumerate(local_parts(tensor))})
    # Others may lie between each other without sharing an element.
    parts = {name: part for name, part in parts.items() if part.layout is torch.strided and part.is_contiguous()}
    for group in sharing_memory(parts):
        names = [name for name, _ in group if name]
        if names and len(names) < len(group):
            raise ValueError(
                f"frozen: a tensor among them is the memory of {names[0]}, which requires grad: training changes it"
            )


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def table_rows(table: bytes) -> list[memoryview]:
    """The rows of a table of tensors to write or to copy: dtype, address, dimensions n, n sizes, n strides."""
    numbers = words(table)
    rows, at = [], 0
    while at < len(numbers):
        end = at + 3 + 2 * numbers[at + 2]
        rows.append(numbers[at:end])
        at = end
    return rows
