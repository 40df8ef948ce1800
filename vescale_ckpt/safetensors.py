"""Saves and loads safetensors files: drop-in replacements for functions of Hugging Face's library, with checksums.

The library reads the files of this module bit for bit, and this module reads the library's. Files saved here store
checksums under one key of `__metadata__`, which the library ignores; see docs/format.md. These functions raise errors
of this package where the library raises `SafetensorError`. For invalid arguments, both raise ValueError, TypeError or
RuntimeError.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from operator import index as as_index
from types import EllipsisType, TracebackType
from typing import Any, Literal, NamedTuple

import torch

from . import settings
from ._checkpoint.safetensors.header_texts import OUR_TEXTS, checked_metadata, with_ties
from ._engine import _C
from ._engine.device_streams import copies_from_cuda, filled_snapshot
from ._engine.dtype_codes import DTYPE_CODES, SAFETENSORS_DTYPES
from ._engine.engine_errors import named_errors
from ._engine.gc import gc_paused
from ._engine.options import batch_bytes, direct_io_setting, engine_options, threads_of
from ._engine.overlap import groups_of, overlap
from ._engine.rows import int_table, words
from ._engine.tensor_checks import as_host_tensor
from ._engine.torch_copies import device_notes, to_device
from ._state.shared_memory import share_no_memory, shared_memory_error, sharing_memory
from ._state.tensor_table import ON_HOST, PLAIN_TYPES, TensorReads, device_number, read_tensors
from ._state.watch import Watch, changed_meanwhile, watch_values
from ._storage.open_storage import checkpoint_path
from ._storage.pending import PendingFile
from .errors import CheckpointError, MissingKeysError, some

__all__ = ["load_file", "safe_open", "save_file"]

Device = str | int | torch.device

_DTYPE_OF = attrgetter("dtype")
_LARGE = 4 << 20  # bytes of a tensor for which huge pages count
#: The index of a tensor in a file, its shape, and offsets and sizes of a box of it.
_Box = tuple[int, Sequence[int], Sequence[int], Sequence[int]]


# --- Saving


def save_file(
    tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Saves tensors to one file. When it returns, the file is durable; if it raises, an existing file is unchanged.

    Args:
        tensors: dense and contiguous tensors on any device, no two of them in the same memory. They must not change
            during the call. Those on devices are copied to host memory in parts of half `VESCALE_CKPT_MEMORY_BYTES`;
            one part is written while the next one is copied.
        filename: replaced if it exists.
        metadata: entries for the header. None: `{"format": "pt"}`, which loaders of models require in every header that
            has metadata; with checksums, the header has metadata.

    Raises:
        ValueError, TypeError, RuntimeError: a tensor or an entry cannot be saved (UnicodeEncodeError is a ValueError).
        StorageFullError, CheckpointError: the file could not be written.
    """
    path = checkpoint_path(filename)
    with gc_paused():  # all objects of `_save` are freed before garbage is collected again
        _save(path, tensors, metadata)


def _save(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    reads = _read_as_they_are(tensors)
    if reads is None:
        _check_tensors(tensors)
        watch = watch_values(tensors.items())
    else:
        watch = Watch(list(tensors), list(tensors.values()), reads)
    texts = checked_metadata({"format": "pt"} if metadata is None else metadata)
    if any(value in tensors for _, value in texts):
        texts = with_ties(texts, {})
    names, values = list(tensors), list(tensors.values())
    reads = reads or read_tensors(values)
    try:
        layout = _C.SafetensorsLayout(names, reads.table, texts)
    except _C.EngineError as error:
        raise ValueError(f"{'' if error.item is None else names[error.item] + ': '}{error}") from None
    with PendingFile(path) as file, named_errors(str, file.directory, layout.file_bytes):
        file.storage.check_space(layout.file_bytes)
        options = engine_options(None, direct_io_setting("auto"))
        writer = file.create(lambda name: _C.FileWriter(name, layout.file_bytes, options))
        _write_parts(writer, layout, _Parts(names, values, reads))
        watch.check_unchanged()
        file.commit()


def _read_as_they_are(tensors: dict[str, torch.Tensor]) -> TensorReads | None:
    """Describes tensors that can be saved directly from their memory, as in most models, without Python code per
    tensor. None: a tensor may have to be copied first, or refused by name."""
    if not isinstance(tensors, dict) or not set(map(type, tensors.values())).issubset(PLAIN_TYPES):
        return None
    try:
        "".join(tensors).encode()
    except (TypeError, UnicodeEncodeError):
        return None
    values = list(tensors.values())
    if not set(map(_DTYPE_OF, values)).issubset(SAFETENSORS_DTYPES.values()):
        return None
    reads = read_tensors(values)
    if reads.ready.count(ON_HOST) != len(values) or _C.not_contiguous(reads.table):
        return None
    return reads if share_no_memory(list(tensors), reads) else None


def _check_tensors(tensors: object) -> None:
    if not isinstance(tensors, dict):
        raise ValueError(f"expected a dict of names and tensors, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r}: expected a text as the name of a tensor, got {type(name).__name__}")
        name.encode()  # raises for text that is not Unicode
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    sparse = [name for name, tensor in tensors.items() if tensor.layout is not torch.strided]
    if sparse:
        raise ValueError(f"{some(sorted(sparse))}: sparse tensors cannot be saved; make them dense with to_dense()")
    for name, tensor in tensors.items():
        try:
            tensor.numel()
        except Exception as error:  # an uninitialized parameter raises, for instance
            raise ValueError(f"{name}: a {type(tensor).__name__} cannot be saved: {error}") from error
    shared = sharing_memory(tensors)
    if shared:
        raise shared_memory_error(shared)
    scattered = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
    if scattered:
        raise ValueError(
            f"{some(sorted(scattered))}: not contiguous. Save the tensor that it is a view of, or make it contiguous "
            "with contiguous()"
        )
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES.values():
            raise ValueError(f"{name}: safetensors files have no {tensor.dtype}: save it as a view of another dtype")


def _write_parts(writer: _C.FileWriter, layout: _C.SafetensorsLayout, parts: _Parts) -> None:
    """Writes the file in parts of at most half `VESCALE_CKPT_MEMORY_BYTES`, while device tensors of the next part are
    copied to host memory."""
    blocks: list[int] = []

    def write(part: _Part) -> list[int]:
        try:
            return writer.write_bytes(part.table, part.offset)
        finally:
            if part.snapshot is not None:
                part.snapshot.release()

    for _, found in overlap(parts.of(layout), write):
        blocks += found
    device_notes()  # logs new ones
    writer.finish_bytes(layout.head(blocks), sync=True)


class _Part(NamedTuple):
    """Consecutive bytes of a file, in host memory."""

    offset: int
    table: array[int]  #: rows: address, bytes
    memory: Sequence[torch.Tensor]  #: copies that rows of the table refer to
    snapshot: _C.Snapshot | None  #: of the other rows


class _Parts:
    """The parts of a file. Host tensors are read from their initial storages, which `reads` keeps alive, even if
    another thread replaces a tensor's memory."""

    def __init__(self, names: list[str], tensors: list[torch.Tensor], reads: TensorReads) -> None:
        self._names, self._tensors, self._reads = names, tensors, reads
        table, at = words(reads.table), 0
        self._addresses: list[int] = []
        while at < len(table):
            self._addresses.append(table[at])
            at += 4 + 2 * table[at + 3]
        self._latest: tuple[int, torch.Tensor] | None = None  # copied without a snapshot; it may go on in the next part

    def of(self, layout: _C.SafetensorsLayout) -> Iterator[_Part]:
        copies = self._reads.ready.count(ON_HOST) < len(self._reads.ready)  # else all lies in memory: one part
        bound = batch_bytes() if copies else layout.file_bytes + _C.CHECKSUM_BLOCK
        most = bound // _C.CHECKSUM_BLOCK * _C.CHECKSUM_BLOCK  # a tensor's blocks must not be cut
        begin = end = layout.data_begin
        pieces: list[tuple[int, int, int]] = []  # tensor, first byte, bytes
        for number, size in zip(layout.order(), layout.sizes(), strict=True):
            done = 0
            while done < size:
                limit = (begin + most) // _C.CHECKSUM_BLOCK * _C.CHECKSUM_BLOCK
                taken = min(size - done, limit - end)
                pieces.append((number, done, taken))
                done, end = done + taken, end + taken
                if end == limit:
                    yield self._part(begin, pieces)
                    begin, pieces = end, []
        if pieces or begin == layout.data_begin:  # a file without elements has a part, too
            yield self._part(begin, pieces)

    def _part(self, offset: int, pieces: Sequence[tuple[int, int, int]]) -> _Part:
        table, rows, devices = int_table(), int_table(), int_table()
        on_devices, memory = [], {}
        for at, (number, begin, size) in enumerate(pieces):
            ready, address = self._reads.ready[number], self._addresses[number] + begin
            if (device := device_number(ready)) >= 0:
                on_devices.append(at)
                rows.extend((DTYPE_CODES[torch.uint8], address, 1, size, 1))
                devices.append(device)
            elif ready != ON_HOST:
                tensor = memory[number] = self._in_host_memory(number)
                if tensor.nbytes < begin + size:
                    raise changed_meanwhile(self._names[number])
                address = tensor.data_ptr() + begin
            table.extend((address, size))
        if not on_devices:
            return _Part(offset, table, [*memory.values()], None)
        snapshot = filled_snapshot(rows, devices, threads_of())
        for at, address in zip(on_devices, words(snapshot.table())[1::5], strict=True):
            table[2 * at] = address
        return _Part(offset, table, [*memory.values()], snapshot)

    def _in_host_memory(self, number: int) -> torch.Tensor:
        if self._latest is None or self._latest[0] != number:
            self._latest = None  # frees it
            try:
                self._latest = number, as_host_tensor(self._tensors[number])[0]
            except Exception as error:  # code of a subclass may raise anything
                raise CheckpointError(f"{self._names[number]}: {error}", key=self._names[number]) from error
        return self._latest[1]


# --- Loading


def load_file(
    filename: str | os.PathLike[str], device: Device = "cpu", *, verify: bool = True
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a file into new memory, in the order of the file.

    Each tensor has its own memory. On a CUDA device, data is verified in host memory and copied while more is read,
    after the queued work of the current stream. All copies are complete when the call returns. For other devices, torch
    copies each tensor from host memory.

    Args:
        filename: the file.
        device: the device of the tensors.
        verify: True compares the bytes with the checksums of files saved by this package. Other files have none.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the data is damaged.
        UntrustedCheckpointError: the header contradicts the file.
        CheckpointError: other errors, including a dtype that torch lacks.
    """
    return _Opened(filename, device, verify).read_all()


class _Opened:
    """An open file with a validated header."""

    def __init__(self, filename: str | os.PathLike[str], device: Device, verify: bool) -> None:
        self.path = checkpoint_path(filename)
        self.device = torch.device(device)
        self.verify = verify
        self.options = engine_options(None, direct_io_setting("auto"))
        try:
            with named_errors(str, self.path):
                self.file = _C.SafetensorsFile.open(self.path, self.options, verify)
        except CheckpointError as error:
            cause = error.__context__
            if isinstance(cause, _C.EngineError) and cause.errno == errno.ENOENT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path) from None
            raise

    @cached_property
    def tensors(self) -> list[tuple[str, str, str, tuple[int, ...]]]:
        """(name, dtype in the format, torch's name of it, shape in the format) per tensor, in the order of the file."""
        return self.file.tensors()

    @cached_property
    def indices(self) -> dict[str, int]:
        return {tensor[0]: index for index, tensor in enumerate(self.tensors)}

    def index_of(self, name: str) -> int:
        try:
            return self.indices[name]
        except KeyError:
            raise MissingKeysError([name]) from None

    def shape(self, index: int) -> tuple[int, ...]:
        """Returns the shape in torch. Raises `CheckpointError` for a tensor that torch cannot hold."""
        try:
            return self.file.torch_shape(index)
        except _C.EngineError as error:
            raise CheckpointError(f"{error}", key=self.tensors[index][0], path=self.path) from None

    @cached_property
    def cuda(self) -> int | None:
        """The CUDA device that the engine copies to; None: host memory."""
        if self.device.type != "cuda" or not copies_from_cuda():
            return None
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _streams(self) -> list[tuple[int, int]]:
        """Returns the CUDA device and its current stream; nothing for host memory."""
        return [] if self.cuda is None else [(self.cuda, torch.cuda.current_stream(self.cuda).cuda_stream)]

    def _empty(self, shape: Sequence[int], name: str) -> torch.Tensor:
        """Allocates memory that the engine fills."""
        if self.cuda is not None:
            return torch.empty(shape, dtype=SAFETENSORS_DTYPES[name], device=self.device)
        tensor = torch.empty(shape, dtype=SAFETENSORS_DTYPES[name], device="cpu")
        if tensor.nbytes >= _LARGE:
            _C.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def read(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return self._read_boxes([(index, shape := self.shape(index), (0,) * len(shape), shape) for index in indices])

    def read_chunk(self, index: int, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return self._read_boxes([(index, self.shape(index), offsets, sizes)])[0]

    def _read_boxes(self, boxes: Sequence[_Box]) -> list[torch.Tensor]:
        """Reads boxes of tensors into new memory."""
        device = -1 if self.cuda is None else self.cuda
        table, devices = int_table(), int_table()
        found, names = list[torch.Tensor](), list[str]()
        for index, shape, offsets, sizes in boxes:
            name, _, dtype, _ = self.tensors[index]
            filled = self._empty(sizes, dtype)
            found.append(filled)
            if filled.numel():
                names.append(name)
                devices.append(device)
                table.extend((0, *self.file.range(index), self.file.head_crc, DTYPE_CODES[filled.dtype], len(shape)))
                table.extend((*shape, *offsets, *sizes, filled.data_ptr(), *filled.stride()))
        with named_errors(names.__getitem__, self.path):
            reads = _C.SafetensorsReads(self.file, self.verify, self.options)
            reads.read_tensors([self.path], table, devices, self._streams())
        return self._on_device(found)

    def read_all(self) -> dict[str, torch.Tensor]:
        with gc_paused():
            read = [tensor for group in self._groups() for tensor in self.read(group)]
            return dict(zip(self.indices, read, strict=True))

    def _groups(self) -> Iterator[list[int]]:
        """Yields the indices of tensors that are read together: all of them, or for a device that torch copies to,
        groups of bounded host memory."""
        if self.device.type == "cpu" or self.cuda is not None:
            yield list(range(self.file.count))
            return
        indices = range(self.file.count)
        yield from groups_of(indices, lambda index: self.file.range(index)[1], settings.number("memory_bytes"))

    def _on_device(self, read: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.device.type == "cpu" or self.cuda is not None:
            return read
        found = [to_device(host, self.device) for host in read]
        device_notes()  # logs new ones
        return found


class safe_open:  # the name that callers know
    """A context manager for a file whose tensors, or parts of them, are read on demand.

    Args:
        filename: an existing file. It stays open, so a later replacement has no effect.
        framework: "pt" (or "torch", "pytorch"): torch tensors.
        device: the device of the tensors.

    If the file has checksums, all data is verified as it is read. Raises the errors of `load_file`.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: Literal["pt", "torch", "pytorch"] = "pt",
        device: Device = "cpu",
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(f"framework: expected 'pt', got {framework!r}")
        self._file: _Opened | None = _Opened(filename, device, verify=True)

    def __enter__(self) -> safe_open:
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file = None

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._opened().indices)

    def offset_keys(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
        return list(self._opened().indices)

    def metadata(self) -> dict[str, str] | None:
        """The metadata of the header, without this package's entries; None if the header has no metadata."""
        metadata = self._opened().file.metadata()
        return metadata and {key: text for key, text in metadata.items() if key not in OUR_TEXTS}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor. Raises `MissingKeysError` if there is none of this name."""
        file = self._opened()
        return file.read([file.index_of(name)])[0]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors, like `load_file`."""
        return self._opened().read_all()

    def get_slice(self, name: str) -> TensorSlice:
        """Returns a tensor without reading it. Raises `MissingKeysError` if there is none of this name."""
        file = self._opened()
        return TensorSlice(file, file.index_of(name))

    def _opened(self) -> _Opened:
        if self._file is None:
            raise CheckpointError("the file was closed")
        return self._file


class TensorSlice:
    """A tensor in a file. `slice[index]` equals `get_tensor(name)[index]`. An index of integers, slices and `...` reads
    only the part that it selects; any other index reads the whole tensor."""

    def __init__(self, file: _Opened, index: int) -> None:
        self._file = file
        self._index = index

    def get_shape(self) -> list[int]:
        """The shape in the header, which counts values; torch counts pairs of values of a 4-bit dtype."""
        return list(self._file.tensors[self._index][3])

    def get_dtype(self) -> str:
        """The dtype in the header: "F32", "BF16", …"""
        return self._file.tensors[self._index][1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape = self._file.shape(self._index)
        items = index if isinstance(index, tuple) else (index,)
        if not all(map(_is_plain, items)) or sum(item is ... for item in items) > 1:
            whole: torch.Tensor = self._file.read([self._index])[0][index]
            return whole
        torch.empty(shape, device="meta")[index]  # raises torch's error for an index that is out of bounds
        chunk = _chunk(shape, items)
        read = self._file.read_chunk(self._index, [start for start, _, _ in chunk], [size for _, size, _ in chunk])
        result = read[tuple(rest for _, _, rest in chunk)]
        return result if result.numel() == read.numel() else result.clone()


def _is_plain(item: object) -> bool:
    if isinstance(item, slice | EllipsisType):
        return True
    return hasattr(item, "__index__") and not isinstance(item, bool | torch.Tensor)


def _chunk(shape: Sequence[int], items: Sequence[Any]) -> list[tuple[int, int, int | slice]]:
    """Returns for each dimension the first index to read, the count to read, and the index to apply to the result."""
    given = [item for item in items if item is not ...]
    missing = [slice(None)] * (len(shape) - len(given))
    at = next((index for index, item in enumerate(items) if item is ...), len(items))
    full = [*given[:at], *missing, *given[at:]]
    chunk: list[tuple[int, int, int | slice]] = []
    for size, item in zip(shape, full, strict=True):
        if isinstance(item, slice):
            indices = range(*item.indices(size))
            count = indices[-1] + 1 - indices[0] if indices else 0
            chunk.append((indices[0] if indices else 0, count, slice(None, None, indices.step)))
        else:
            chunk.append((as_index(item) % size, 1, 0))
    return chunk
