"""The data files that a rank writes in one save, and the tensors that go into them, some at a time."""

from __future__ import annotations

import contextlib
import io
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from . import _C, engine, settings
from ._native import names
from ._storage.directory import directory_at
from ._storage.pending import make_locked
from .errors import CheckpointError
from .hooks import is_method_of
from .overlap import GROUP_TENSORS, overlap
from .packed import words
from .stats import SaveStats

if TYPE_CHECKING:
    from .writer import StorageWriter


class DataFiles:
    """All data files of a rank's save. As a context: an error removes them, and lets go of the save's lock."""

    names_are_final = True

    def __init__(self, writer: StorageWriter) -> None:
        self.writer = writer
        self._files: list[DataFile] = []
        self._token = ""
        self._started = time.perf_counter()

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> DataFile:
        """`body_bytes`: of each tensor that will be in it; `part`: its number, if a rank writes several."""

        def make() -> tuple[str, DataFile]:
            if not self._files:
                self._token = names.new_token()
            name = names.data_name(self.writer.rank, self._token, part)
            file = DataFile(self.writer, name, body_bytes, in_background)
            return file.path, file

        if self._files:
            _, file = make()
        else:
            file, lock = make_locked(make)
            self.writer.hold(lock)
        self._files.append(file)
        return file

    def finish(self, tensors: int, objects: int) -> SaveStats:
        """Makes the names of the files durable; each of them is finished already."""
        writer, files = self.writer, self._files
        if writer.sync_files and files and self.names_are_final:
            with engine.named_errors(str, writer.path):
                directory_at(writer.path).sync()
        kinds = ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes")
        total = {kind: sum(file.stats[kind] for file in files) for kind in kinds}
        return SaveStats(
            seconds=time.perf_counter() - self._started,
            tensors=tensors,
            objects=objects,
            bytes=sum(file.tensor_bytes for file in files),
            io_path=engine.used_paths(total),
            file_bytes=sum(file.length for file in files),
            **total,
        )

    def discard(self) -> None:
        self.writer.end()
        for file in self._files:
            file.discard()


class DataFile:
    """One data file while it is written. Removed unless `finish` was reached and `discard` never called."""

    def __init__(self, writer: StorageWriter, name: str, body_bytes: Any, in_background: bool) -> None:
        self.writer = writer
        self.name = name
        self.path = os.path.join(writer.path, name)
        self.length = 0
        self.stats: dict[str, int] = {}
        self.tensor_bytes = sum(memoryview(body_bytes).cast("B").cast("q"))
        self.needed = _C.expected_bytes(body_bytes)
        with engine.named_errors(str, writer.path, self.needed):
            engine.check_space(writer.path, self.needed)
            options = engine.options(writer.thread_count, writer.direct_io, in_background)
            self.file: _C.FileWriter | None = _C.FileWriter(self.path, body_bytes, options, writer.checksums)

    # What follows returns rows of offset, length and CRC-32.

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        """`rows`: of the rank's part, one for each of the table: where files were laid out before, it decides."""
        assert self.file is not None
        with engine.named_errors(key_of, self.writer.path, self.needed):
            return words(self.file.write_tensors(table)).tolist()

    def write_tensors(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[int]:
        written = 0

        def write(group: Group) -> list[int]:
            nonlocal written
            rows = range(written, written := written + len(group.items))
            return self.write_table(write_table(group.tensors), lambda row: group.items[row].index.fqn, rows)

        return [number for _, placed in overlap(groups(items, planner), write) for number in placed]

    def write_objects(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[int]:
        contents = []
        for item in items:
            resolved = planner.resolve_data(item)
            if not isinstance(resolved, io.BytesIO):
                raise CheckpointError(
                    f"{item.index.fqn}: the planner resolved an object to {type(resolved).__name__}, not BytesIO"
                )
            contents.append(resolved.getvalue())
        return self.write_contents(contents, [item.index.fqn for item in items])

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        if not contents:
            return []
        assert self.file is not None
        needed = self.needed + sum(map(len, contents))
        with engine.named_errors(keys.__getitem__, self.writer.path, needed):
            return words(self.file.write_objects(contents)).tolist()

    def finish(self) -> None:
        assert self.file is not None
        with engine.named_errors(str, self.writer.path, self.needed):
            self.length = self.file.finish(self.writer.sync_files)
        self.stats = self.file.stats()
        self.file = None  # closes it: there may be as many files as tensors
        if self.writer.direct_io is True and self.stats["uncached_bytes"] + self.stats["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self.path} could not be written past the page cache "
                f"({engine.used_paths(self.stats)})"
            )

    def progress(self) -> int:
        """Bytes that were given to the file so far. Any thread may ask."""
        file = self.file
        return self.length if file is None else file.progress()

    def cancel(self) -> None:
        """Lets what goes on in another thread fail soon."""
        if (file := self.file) is not None:
            file.cancel()

    def discard(self) -> None:
        self.file = None  # an unfinished file removes itself
        with contextlib.suppress(_C.EngineError):  # not in place of the error that led here
            directory_at(self.writer.path).remove(self.name)


@dataclass
class Group:
    """Tensors that are written together, in memory that the engine can use."""

    items: list[WriteItem] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


def write_table(tensors: Sequence[torch.Tensor]) -> array[int]:
    """The engine's table of tensors, which must live until they are written."""
    table = engine.int_table()
    for tensor in tensors:
        shape = tensor.shape
        table.extend((engine.DTYPE_CODES[tensor.dtype], tensor.data_ptr(), len(shape), *shape, *tensor.stride()))
    return table


def groups(items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[Group]:
    """Cuts a rank's tensors into groups, by number, and by bytes where tensors are not the state's own memory: copies
    from a device and what a planner makes up live until they are written, two groups at a time."""
    budget = settings.number("arena_bytes") // 2
    makes_tensors = _makes_tensors(planner)
    group, held = Group(), 0
    for item in items:
        tensor, own_memory = _resolve(planner, item)
        engine.dtype_code(tensor.dtype, item.index.fqn)  # raises for those that cannot be stored
        group.items.append(item)
        group.tensors.append(tensor)
        if own_memory or makes_tensors:
            held += tensor.nbytes
        if held >= budget or len(group.items) == GROUP_TENSORS:
            yield group
            group, held = Group(), 0
    if group.items:
        yield group


def _resolve(planner: SavePlanner, item: WriteItem) -> tuple[torch.Tensor, bool]:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a tensor to {type(tensor).__name__}", key=item.index.fqn
        )
    wanted = item.tensor_data.chunk.sizes if item.tensor_data is not None else None
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a chunk of shape {tuple(wanted or ())} to {tuple(tensor.shape)}",
            key=item.index.fqn,
        )
    try:
        return engine.as_host_tensor(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"{item.index.fqn}: {error}", key=item.index.fqn) from error


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether the planner may answer `resolve_data` with tensors that are not the state's own."""
    return not isinstance(planner, DefaultSavePlanner) or any(
        not is_method_of(planner, name, DefaultSavePlanner)
        and not getattr(getattr(planner, name), "keeps_memory", False)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )
