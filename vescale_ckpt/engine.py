"""What Python and the C++ engine say to each other: options, dtype codes, the rows of tables, and errors."""

from __future__ import annotations

import errno
import os
import resource
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from . import _C, settings
from .errors import CheckpointError, CorruptCheckpointError, StorageFullError, UntrustedCheckpointError
from .settings import DirectIO

if TYPE_CHECKING:
    from collections.abc import Iterator

#: dtype → code in the engine's tables, for every dtype that torch.save can store
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, (name, _, _) in enumerate(_C.dtypes()) if hasattr(torch, name)
}

CODE_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}

_ACCESS = {"auto": "direct", "on": "direct", True: "direct only", "off": "buffered", False: "buffered"}


def direct_io_setting(argument: DirectIO) -> DirectIO:
    """The caller's `direct_io`, or the environment's where the caller left it open."""
    if argument != "auto" and not isinstance(argument, bool):
        raise ValueError(f"direct_io={argument!r}: 'auto', True or False is wanted")
    if argument == "auto":
        return {"auto": "auto", "on": True, "off": False}[str(settings.lenient("direct_io"))]  # type: ignore[return-value]
    return argument


def thread_count(argument: int | None) -> int:
    """The caller's `thread_count`, or the setting."""
    return settings.number("threads") if argument is None else argument


def options(threads: int | None, direct_io: DirectIO, in_background: bool = False) -> _C.Options:
    """The engine's options for one save or load; `in_background`: one that training goes on beside."""
    return _C.Options(
        threads=thread_count(threads),
        slot_bytes=settings.number("slot_bytes"),
        arena_bytes=settings.number("arena_bytes"),
        access=_ACCESS[direct_io],
        niceness=settings.number("background_niceness") if in_background else 0,
        bytes_per_second=settings.number("background_bytes_per_second") if in_background else 0,
    )


def dtype_code(dtype: torch.dtype, key: str) -> int:
    """Raises `CheckpointError` with the key for a dtype that torch itself has no way to store."""
    try:
        return DTYPE_CODES[dtype]
    except KeyError:
        raise CheckpointError(
            f"{key} has dtype {dtype}, which torch.save cannot store either: save it as a view of uint8",
            key=key,
            dtype=str(dtype),
        ) from None


def is_plain_tensor(value: object) -> bool:
    """Whether it is a tensor and nothing more: no shard of another, no subclass with a mind of its own."""
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def holds_any(flat: Mapping[Any, Any], kind: type) -> bool:
    """Whether one of the values is an instance of `kind`: asks the few types that there are, not the many values."""
    return any(issubclass(type_, kind) for type_ in set(map(type, flat.values())))


@contextmanager
def named_errors(key_of: Callable[[int], str], path: str, needed: int = 0) -> Iterator[None]:
    """Turns the engine's errors into this package's; `key_of` names a row of the table at hand."""
    try:
        yield
    except _C.EngineError as error:
        raise translate(error, key_of, path, needed) from None


@contextmanager
def named_system_errors(path: str, needed: int = 0) -> Iterator[None]:
    """The same, and for errors of the operating system, too, met by Python: for what calls nothing of the user's."""
    try:
        with named_errors(str, path, needed):
            yield
    except OSError as error:
        raise of_system(error, path, needed) from error


def check_space(directory: str, needed: int) -> None:
    """Raises `StorageFullError` before anything is written for which there is no room. Within `named_errors`."""
    free = _C.free_bytes(directory)
    if free < needed:
        raise StorageFullError(directory, needed, free)


def translate(error: _C.EngineError, key_of: Callable[[int], str], path: str, needed: int) -> CheckpointError:
    key = key_of(error.item) if error.item is not None else None
    prefix = f"{key}: " if key is not None else ""
    if error.kind == "full":
        return _full(path, needed, error.errno, str(error))
    if error.kind == "corrupt":
        return CorruptCheckpointError(f"{prefix}{error}", key=key, file=error.path, offset=error.offset)
    if error.kind == "invalid":
        return UntrustedCheckpointError(f"{prefix}{error}", key=key)
    missing = error.errno == 2 and error.kind == "io"
    if missing and str(error).startswith("open"):
        return CorruptCheckpointError(f"{prefix}data file is missing: {error}", key=key, file=error.path)
    return CheckpointError(f"{prefix}{error}", key=key, path=error.path, errno=error.errno)


def of_system(error: OSError, path: str, needed: int = 0) -> CheckpointError:
    """What to raise for an error of the operating system, met while doing something in `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _full(path, needed, error.errno, str(error))
    where = error.filename if isinstance(error.filename, str) else path
    text = str(error) if error.filename is not None else f"{path}: {error}"
    return CheckpointError(text, path=where, errno=error.errno)


def _full(path: str, needed: int, number: int, cause: str) -> StorageFullError:
    """What there is too little of: bytes, a quota, files, or the bytes that a file may have."""
    try:
        while not os.path.lexists(path) and os.path.dirname(path) != path:  # it was to be made
            path = os.path.dirname(path)
        space = os.statvfs(path)
        free, no_files = space.f_bavail * space.f_frsize, space.f_files > 0 and space.f_favail == 0
    except OSError:
        free, no_files = 0, False
    what = ""
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        own = "the file system allows no larger ones" if limit < 0 else f"the limit is {limit:,} bytes (ulimit -f)"
        what = f"a file in {path} would be too large: {own}. Raise the limit, or save smaller files"
    elif number == errno.EDQUOT:
        what = f"the quota of bytes or files is used up in {path} (see quota -s)"
    elif no_files:
        what = f"no room in {path} for another file: its file system has no inodes left, whatever bytes are free"
    return StorageFullError(path, needed, free, cause, what)


def int_table(rows: Sequence[int] = ()) -> array[int]:
    return array("q", rows)


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the engine can use the tensor's memory as it is: dense, on the CPU, no lazy conjugation or negation, and
    really there (frameworks free and resize the storages of tensors that live on)."""
    return (
        is_plain_tensor(tensor)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (tensor.numel() == 0 or not tensor._is_zerotensor())
        and _is_backed(tensor)
    )


def _is_backed(tensor: torch.Tensor) -> bool:
    return reach(tensor) <= tensor.untyped_storage().nbytes()


def reach(tensor: torch.Tensor) -> int:
    """Up to which byte of its storage a strided tensor goes."""
    elements = tensor.numel()
    if elements == 0:
        return 0
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + elements) * tensor.itemsize


_MOST_LOOKED_AT = 1 << 24  # elements, of a tensor whose strides alone do not tell


def overlapping(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of those of which several elements are the same memory: expanded ones, or windows that overlap. What
    is loaded into one would be whatever was written last; torch refuses to copy into what is expanded, too."""
    try:
        contiguous = list(map(torch.Tensor.is_contiguous, tensors))
    except RuntimeError:  # not dense: torch itself will see to them
        contiguous = [not is_plain_tensor(tensor) or tensor.layout is not torch.strided for tensor in tensors]
    return [number for number, good in enumerate(contiguous) if not good and _overlaps_itself(tensors[number])]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if not is_plain_tensor(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    last, disjoint = 0, True  # how far the dimensions before this one reach
    for stride, size in dims:
        if stride == 0:
            return True
        disjoint = disjoint and stride > last
        last += (size - 1) * stride
    if disjoint:
        return False
    if tensor.numel() > _MOST_LOOKED_AT:
        return True  # hardly anybody cuts one like that and has no overlap
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    in_order: torch.Tensor = places.flatten().sort().values
    return bool((in_order[1:] == in_order[:-1]).any())


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether `copy_` into a tensor that is not `is_host_memory` has somewhere to write. Subclasses know themselves."""
    if tensor.is_meta:  # where `copy_` does nothing, and says nothing
        return False
    return not is_plain_tensor(tensor) or tensor.layout is not torch.strided or _is_backed(tensor)


def as_host_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor of the same values that `is_host_memory`, and whether it has memory of its own.

    Raises `CheckpointError` for tensors whose values are not in one dense storage.
    """
    if is_host_memory(tensor):
        return tensor, False
    plain = tensor.detach()
    if isinstance(plain, AsyncCollectiveTensor):
        plain = plain.wait()
    if plain.is_meta:
        raise CheckpointError("a tensor on the meta device has no values to store")
    if hasattr(plain, "__tensor_flatten__") or isinstance(plain, FakeTensor):
        raise CheckpointError(
            f"a {type(plain).__name__} cannot be stored as one tensor: save the tensors that it is made of"
        )
    if not is_plain_tensor(plain):
        plain = plain.as_subclass(torch.Tensor)
    if plain.layout is not torch.strided or plain.is_quantized:
        raise CheckpointError(f"a tensor of layout {plain.layout} and dtype {plain.dtype} cannot be stored: not dense")
    if plain._is_zerotensor() or not _is_backed(plain):
        raise CheckpointError("its storage was freed, or is smaller than the tensor: there are no values to store")
    memory = plain.data_ptr()
    plain = plain.to("cpu").resolve_conj().resolve_neg()
    return plain, plain.data_ptr() != memory


def used_paths(stats: dict[str, Any]) -> str:
    """How the bytes travelled, in words: `direct 98 % (in place 97 %)`."""
    ways = {way: int(stats[f"{way}_bytes"]) for way in ("direct", "uncached", "buffered")}
    total = sum(ways.values())
    if total == 0:
        return "nothing moved"
    text = ", ".join(f"{way} {100 * moved / total:.0f} %" for way, moved in ways.items() if moved)
    return f"{text} (in place {100 * int(stats['in_place_bytes']) / total:.0f} %)"
