"""Saves and loads Hugging Face's safetensors files, with functions that replace those of the safetensors library.

The library reads these files bit for bit, and this module reads those of the library. Files saved here hold checksums
under one key of `__metadata__`, which the library shows and ignores; see docs/format.md. Where the library raises
`SafetensorError`, these functions raise errors of this package. For wrong arguments both raise ValueError, TypeError or
RuntimeError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from operator import index as as_index
from types import EllipsisType, TracebackType
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack

from . import settings
from ._checkpoint.safetensors.header_texts import (
    DTYPES,
    MISSING_DTYPES,
    OUR_TEXTS,
    STORABLE,
    checked_metadata,
    with_ties,
)
from ._engine import _C
from ._engine.engine_errors import check_space, named_errors
from ._engine.gc import gc_paused
from ._engine.options import direct_io_setting, engine_options
from ._engine.rows import DTYPE_CODES, int_table
from ._engine.tensor_checks import as_host_tensor
from ._state.shared_memory import shared_memory_error, sharing_memory
from ._state.tensor_table import ON_HOST, PLAIN_TYPES, TensorReads, read_tensors, tensor_table
from ._state.watch import WatchedState
from ._storage.open_storage import checkpoint_path
from ._storage.pending import PendingFile
from .errors import CheckpointError, MissingKeysError, some

__all__ = ["load_file", "safe_open", "save_file"]

Device = str | int | torch.device

_DTYPE_OF = attrgetter("dtype")


# --- Saving


def save_file(
    tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Saves tensors to one file. When it returns the file is durable; if it raises, an existing file is untouched.

    Args:
        tensors: dense and contiguous, no two of them in the same memory, on any device. They must not change while this
            runs.
        filename: replaced if it exists.
        metadata: texts for the header. None: `{"format": "pt"}`, which loaders of models require in every header that
            has metadata; with checksums the header has metadata.

    Raises ValueError (UnicodeEncodeError is one), TypeError or RuntimeError for tensors or texts that cannot be saved,
    `StorageFullError`, `CheckpointError`.
    """
    path = checkpoint_path(filename)
    with gc_paused():  # it has a function of its own, whose objects are gone before garbage is collected again
        _save(path, tensors, metadata)


def _save(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    reads = _read_as_they_are(tensors)
    if reads is None:
        _check_tensors(tensors)
    watch = WatchedState(tensors, reads)
    texts = checked_metadata({"format": "pt"} if metadata is None else metadata)
    if any(value in tensors for _, value in texts):
        texts = with_ties(texts, {})
    names, hosts = list(tensors), list(tensors.values())
    hosts, table = _in_host_memory(names, hosts) if reads is None else (hosts, reads.table)
    try:
        layout = _C.SafetensorsLayout(names, table, texts)
    except _C.EngineError as error:
        raise ValueError(f"{'' if error.item is None else names[error.item] + ': '}{error}") from None
    _write(path, layout, table, watch)
    del hosts  # `table` holds their addresses: they must live until the write is done


def _write(path: str, layout: _C.SafetensorsLayout, table: bytes, watch: WatchedState) -> None:
    with PendingFile(path) as file, named_errors(str, file.directory, layout.file_bytes):
        check_space(file.directory, layout.file_bytes)
        options = engine_options(None, direct_io_setting("auto"))
        writer = file.create(lambda name: _C.FileWriter.exactly(name, layout.file_bytes, options))
        _C.write_safetensors(writer, layout, table, sync=True)
        watch.check_unchanged()
        file.commit()


def _read_as_they_are(tensors: dict[str, torch.Tensor]) -> TensorReads | None:
    """What a save needs to know of tensors that can be saved from where they are, as those of most models can. It runs
    no Python code for each tensor. None: one may have to be copied first, or refused by name."""
    if not isinstance(tensors, dict) or not set(map(type, tensors.values())).issubset(PLAIN_TYPES):
        return None
    try:
        "".join(tensors).encode()
    except (TypeError, UnicodeEncodeError):
        return None
    values = list(tensors.values())
    if not STORABLE.issuperset(map(_DTYPE_OF, values)):
        return None
    reads = read_tensors(values)
    as_they_are = reads.ready.count(ON_HOST) == len(values) and _C.are_dense_and_apart(reads.table)
    return reads if as_they_are else None


def _check_tensors(tensors: object) -> None:
    if not isinstance(tensors, dict):
        raise ValueError(f"expected a dict of names and tensors, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r}: the names of tensors are text, not {type(name).__name__}")
        name.encode()  # raises for text that is not Unicode
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    sparse = [name for name, tensor in tensors.items() if tensor.layout is not torch.strided]
    if sparse:
        raise ValueError(f"{some(sorted(sparse))}: sparse tensors cannot be saved; make them dense with to_dense()")
    for name, tensor in tensors.items():
        try:
            tensor.numel()
        except Exception as error:  # of an uninitialized parameter, say
            raise ValueError(f"{name}: a {type(tensor).__name__} cannot be saved: {error}") from error
    shared = sharing_memory(tensors)
    if shared:
        raise shared_memory_error(shared)
    scattered = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
    if scattered:
        raise ValueError(
            f"{some(sorted(scattered))}: not contiguous. Save the tensor that it is a view of, or pack it with "
            "contiguous()"
        )
    for name, tensor in tensors.items():
        if tensor.dtype not in STORABLE:
            raise ValueError(f"{name}: safetensors files have no {tensor.dtype}: save it as a view of another dtype")


def _in_host_memory(names: list[str], tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], bytes]:
    """The tensors, with copies in host memory for those that the engine cannot read in place, and their table."""
    reads = read_tensors(tensors)
    others = [row for row, flag in enumerate(reads.ready) if flag != ON_HOST]
    if not others:
        return tensors, reads.table
    hosts = list(tensors)
    for row in others:
        try:
            hosts[row] = as_host_tensor(tensors[row])[0]
        except Exception as error:  # a subclass may do anything
            raise CheckpointError(f"{names[row]}: {error}", key=names[row]) from error
    return hosts, tensor_table(hosts)


# --- Loading


def load_file(
    filename: str | os.PathLike[str], device: Device = "cpu", *, verify: bool = True
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a file into new memory, in the order of the file.

    A tensor of 8 MiB or more has memory of its own. Smaller ones share memory with their neighbours in the file, at
    most 16 MiB, which is given back when the last of them is gone: `clone()` frees one from the others. On the CPU each
    tensor has a storage of its own, of its own size. As the library's, these storages cannot grow (`resize_`).

    On a CUDA device the memory is torch's, and tensors that share it share a storage: `torch.save` of one of them
    writes all of it, and to resize that storage changes all of them. Each begins at a multiple of 512 bytes. What is
    read is verified in host memory and copied while more is read, after the work that the current stream has queued;
    all is there when this returns. For other devices torch copies each tensor from host memory.

    `verify` compares the bytes with the checksums of files that were saved here. Other files have no checksums.

    Raises FileNotFoundError, `CorruptCheckpointError`, `UntrustedCheckpointError` (the header contradicts the file), or
    `CheckpointError`, also for a dtype that torch does not have.
    """
    return _Opened(filename, device, verify).read_all()


class _Opened:
    """An open file whose header has been read and checked."""

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
        """Name, the format's dtype, torch's name of that dtype, the format's shape; in the order of the file."""
        return self.file.tensors()

    @cached_property
    def number(self) -> dict[str, int]:
        return {tensor[0]: number for number, tensor in enumerate(self.tensors)}

    def numbered(self, name: str) -> int:
        try:
            return self.number[name]
        except KeyError:
            raise MissingKeysError([name]) from None

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape as torch has it. Raises `CheckpointError` for a tensor that torch cannot hold."""
        with self._errors_of_torch([number]):
            return self.file.torch_shape(number)

    @contextmanager
    def _errors_of_torch(self, numbers: Sequence[int]) -> Iterator[None]:
        for name, _, torch_name, _ in map(self.tensors.__getitem__, numbers if MISSING_DTYPES else ()):
            if torch_name in MISSING_DTYPES:
                raise CheckpointError(f"{name}: this torch has no {torch_name}", path=self.path)
        try:
            yield
        except _C.EngineError as error:
            key = self.tensors[numbers[error.item or 0]][0]
            raise CheckpointError(f"{error}", key=key, path=self.path) from None

    @cached_property
    def cuda(self) -> int | None:
        """The CUDA device that the engine copies to; None: it reads into host memory."""
        if self.device.type != "cuda" or not _C.copies_from_cuda():
            return None
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _streams(self) -> list[tuple[int, int]]:
        """The CUDA device and its current stream; none for host memory."""
        return [] if self.cuda is None else [(self.cuda, torch.cuda.current_stream(self.cuda).cuda_stream)]

    def _empty(self, shape: Sequence[int], name: str) -> torch.Tensor:
        """Memory for what the engine reads."""
        return torch.empty(shape, dtype=DTYPES[name], device="cpu" if self.cuda is None else self.device)

    def read(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        device, stream = (self._streams() or [(-1, 0)])[0]
        with self._errors_of_torch(numbers):
            load = _C.SafetensorsLoad(self.file, numbers, self.verify, self.options, self._empty, device, stream)
        tensors = load.tensors(from_dlpack, _part_of)
        with named_errors(lambda row: self.tensors[numbers[row]][0], self.path):
            load.finish()
        return self._on_device(tensors)

    def read_box(self, number: int, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        shape = self.shape(number)
        filled = self._empty(sizes, self.tensors[number][2])
        if filled.numel():
            at, length = self.file.range(number)
            code = DTYPE_CODES[filled.dtype]
            box = (len(shape), *shape, *offsets, *sizes, filled.data_ptr(), *filled.stride())
            table = int_table([0, at, length, self.file.head_crc, code, *box])
            devices = int_table([-1 if self.cuda is None else self.cuda])
            with named_errors(lambda _: self.tensors[number][0], self.path):
                reads = _C.SafetensorsReads(self.file, self.verify, self.options)
                reads.read_tensors([self.path], table, devices, self._streams())
        return self._on_device([filled])[0]

    def read_all(self) -> dict[str, torch.Tensor]:
        with gc_paused():
            read = [tensor for group in self._groups() for tensor in self.read(group)]
            return dict(zip(self.number, read, strict=True))

    def _groups(self) -> Iterator[list[int]]:
        """Numbers of the tensors to read together: all of them, or for another device groups of bounded host memory."""
        if self.device.type == "cpu" or self.cuda is not None:
            yield list(range(self.file.count))
            return
        group: list[int] = []
        held = 0
        for number in range(self.file.count):
            group.append(number)
            held += self.file.range(number)[1]
            if held >= settings.number("arena_bytes"):
                yield group
                group, held = [], 0
        yield group

    def _on_device(self, read: list[torch.Tensor]) -> list[torch.Tensor]:
        there = self.device.type == "cpu" or self.cuda is not None
        return read if there else [host.to(self.device) for host in read]


def _part_of(block: torch.Tensor, begin: int, end: int, shape: list[int], name: str) -> torch.Tensor:
    """The tensor in a range of a block of bytes.

    It shares the block's storage: torch's `record_stream` and its sharing between processes do nothing, or fail, for a
    storage of our own on a device. It does not share the version counter: autograd would take a change of one tensor
    for a change of all.
    """
    return block[begin:end].view(DTYPES[name]).view(shape).data


class safe_open:  # the name that callers know
    """A context manager for a file whose tensors, or parts of them, are read on demand.

    Args:
        filename: must exist. The file stays open: replacing it later has no effect here.
        framework: "pt" (or "torch", "pytorch"): torch tensors.
        device: where tensors are put. On a CUDA device `get_tensor` and slices give tensors with memory of their own.

    All data is verified as it is read, if the file has checksums. Raises the errors of `load_file`.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: Literal["pt", "torch", "pytorch"] = "pt",
        device: Device = "cpu",
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(f"framework={framework!r}: only 'pt' is known")
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
        return sorted(self._opened().number)

    def offset_keys(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
        return list(self._opened().number)

    def metadata(self) -> dict[str, str] | None:
        """The metadata of the header, without the texts that this package adds; None if the header has no metadata."""
        metadata = self._opened().file.metadata()
        return metadata and {key: text for key, text in metadata.items() if key not in OUR_TEXTS}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Raises `MissingKeysError` if there is no such tensor."""
        file = self._opened()
        return file.read([file.numbered(name)])[0]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, as `load_file` returns them."""
        return self._opened().read_all()

    def get_slice(self, name: str) -> TensorSlice:
        """The tensor, not read yet. Raises `MissingKeysError` if there is no such tensor."""
        file = self._opened()
        return TensorSlice(file, file.numbered(name))

    def _opened(self) -> _Opened:
        if self._file is None:
            raise CheckpointError("the file was closed")
        return self._file


class TensorSlice:
    """A tensor in a file. `slice[index]` equals `get_tensor(name)[index]`. An index of numbers, slices and `...` reads
    only the box that it needs; any other index reads the whole tensor."""

    def __init__(self, file: _Opened, number: int) -> None:
        self._file = file
        self._number = number

    def get_shape(self) -> list[int]:
        """The shape in the header. It counts each value of a 4-bit dtype, where torch counts pairs of them."""
        return list(self._file.tensors[self._number][3])

    def get_dtype(self) -> str:
        """The dtype in the header: "F32", "BF16", …"""
        return self._file.tensors[self._number][1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape = self._file.shape(self._number)
        items = index if isinstance(index, tuple) else (index,)
        if not all(map(_is_plain, items)) or sum(item is ... for item in items) > 1:
            whole: torch.Tensor = self._file.read([self._number])[0][index]
            return whole
        torch.empty(shape, device="meta")[index]  # raises what torch raises for an index that is out of bounds
        box = _box(shape, items)
        read = self._file.read_box(self._number, [start for start, _, _ in box], [size for _, size, _ in box])
        result = read[tuple(rest for _, _, rest in box)]
        return result if result.numel() == read.numel() else result.clone()


def _is_plain(item: object) -> bool:
    if isinstance(item, slice | EllipsisType):
        return True
    return hasattr(item, "__index__") and not isinstance(item, bool | torch.Tensor)


def _box(shape: Sequence[int], items: Sequence[Any]) -> list[tuple[int, int, int | slice]]:
    """For each dimension: the first index to read, how many to read, and the index to apply to what was read."""
    given = [item for item in items if item is not ...]
    missing = [slice(None)] * (len(shape) - len(given))
    at = next((position for position, item in enumerate(items) if item is ...), len(items))
    full = [*given[:at], *missing, *given[at:]]
    box: list[tuple[int, int, int | slice]] = []
    for size, item in zip(shape, full, strict=True):
        if isinstance(item, slice):
            wanted = range(*item.indices(size))
            count = wanted[-1] + 1 - wanted[0] if wanted else 0
            box.append((wanted[0] if wanted else 0, count, slice(None, None, wanted.step)))
        else:
            box.append((as_index(item) % size, 1, 0))
    return box
