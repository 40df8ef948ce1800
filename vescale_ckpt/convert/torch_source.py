"""Files of torch.save."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .. import _C
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from ..flatten import flatten, flatten_with_structure
from ..stock import checkpoint_offset
from .archive import Entry, damage_named, entries
from .raw_files import Area, RawFiles, RawTensor
from .source import Read, TensorInfo
from .torch_pickle import unpickled


class TorchSource:
    """A dict, nested or not, whose tensors are read from where they lie. Keys are flattened as DCP does.

    Nothing but its pickle is read at first. Tensors that do not lie as they are (transposed ones) are mapped to memory.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        stored = entries(path)
        state, places = tensors_in(path, stored)
        flat, self.paths, self.structure = flatten_with_structure(_checked(state, path))
        self._files = RawFiles([path], path)
        self._raw: dict[str, RawTensor] = {}
        self._odd: dict[str, Area] = {}
        self._mapped: dict[str, Any] | None = None
        self.tensors: dict[str, TensorInfo] = {}
        for key, value in flat.items():
            if isinstance(value, torch.Tensor):
                self._add(key, value, places)
        self.object_names = [key for key in flat if key not in self.tensors]
        self._plain = {key: flat[key] for key in self.object_names if not _holds_tensor(flat[key])}

    def _add(self, key: str, value: torch.Tensor, places: Mapping[int, Place]) -> None:
        place = places.get(id(value))
        if place is None or value.layout is not torch.strided or value.is_quantized:
            kind = f"{type(value).__name__} of layout {value.layout}"
            raise CheckpointError(f"{key}: a {kind} cannot be converted, or its data are missing", key=key)
        info = self.tensors[key] = TensorInfo(tuple(value.shape), value.dtype)
        entry = place.entry
        if not entry.stored:  # by another tool
            raise CheckpointError(f"{key}: its data are compressed in {self._path}: load it and save it again", key=key)
        area = Area(0, entry.offset, entry.bytes, entry.crc or -1)
        offset = area.offset + place.offset
        if value.is_contiguous() and not value.is_conj() and not value.is_neg():
            if value.numel() and offset + value.numel() * value.itemsize > area.offset + area.bytes:
                raise UntrustedCheckpointError(f"{key}: it would reach beyond its storage in {self._path}", key=key)
            self._raw[key] = RawTensor(info, offset, area)
        else:
            self._odd[key] = area

    def close(self) -> None:
        self._mapped = None

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        wanted = list(names)
        if all(key in self._plain for key in wanted):
            return {key: self._plain[key] for key in wanted}
        with open(self._path, "rb") as file:
            length = file.seek(0, io.SEEK_END)
        wrong, offset, _, _ = _C.check_archive_at(self._path, 0, length, -1)  # they hold tensors
        if wrong:
            raise CorruptCheckpointError(f"{self._path}: {wrong}", key=None, file=self._path, offset=offset)
        return {key: self._values()[key] for key in wanted}

    def read(self, reads: Sequence[Read]) -> None:
        self._files.read([read for read in reads if read.key in self._raw], self._raw.__getitem__)
        for read in reads:
            if read.key in self._odd:
                self._files.verify(self._odd[read.key], read.key)
                tensor = self._values()[read.key]
                for dim, (start, length) in enumerate(zip(read.offsets, read.target.shape, strict=True)):
                    tensor = tensor.narrow(dim, start, length)
                read.target.copy_(tensor.detach())

    def _values(self) -> dict[str, Any]:
        if self._mapped is None:
            self._mapped = flatten(_checked(_load(self._path, mmap=True), self._path))[0]
        return self._mapped


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    entry: Entry  #: its storage
    offset: int  #: of its first byte in that


def tensors_in(path: str, stored: Sequence[Entry]) -> tuple[Any, dict[int, Place]]:
    """What a file of torch.save holds, without data, and by `id` where those of each tensor are."""
    data, root = _pickle(path, stored)
    found = unpickled(data)
    if found is not None:
        state, tensors = found
        by_name = {entry.name: entry for entry in stored}
        entries_of = {number: by_name.get(f"{root}data/{tensor.key}") for number, tensor in tensors.items()}
        return state, {number: Place(entry, tensors[number].offset) for number, entry in entries_of.items() if entry}
    by_offset: dict[int | None, Entry] = {entry.offset: entry for entry in stored}
    with FakeTensorMode():
        state = _load(path)
    places = {}
    for value in flatten(_checked(state, path))[0].values():
        if isinstance(value, FakeTensor):
            entry = by_offset.get(checkpoint_offset(value.untyped_storage()))
            if entry is not None:
                places[id(value)] = Place(entry, int(value.storage_offset()) * value.itemsize)
    return state, places


def _load(path: str, **options: Any) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise UntrustedCheckpointError(
            f"{path} needs code to load, which conversions do not run (if you trust it, add its classes by "
            f"torch.serialization.add_safe_globals): {error}"
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CorruptCheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}", key=None, file=path
        ) from error


def _checked(state: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, no dict of tensors", path=path)
    return state


def _pickle(path: str, stored: Sequence[Entry]) -> tuple[bytes, str]:
    """The pickle, and what stands before the names of all entries."""
    names = [entry.name for entry in stored if entry.name.endswith("/data.pkl")]
    if len(names) != 1:
        raise CheckpointError(f"{path} is an archive, but none of torch.save", path=path)
    root = names[0].removesuffix("data.pkl")
    with damage_named(path), zipfile.ZipFile(path) as archive:  # which compares checksums
        if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError(f"{path} was saved on a big-endian machine: load it and save it again", path=path)
        return archive.read(names[0]), root


class _TensorFinder(pickle.Pickler):
    found = False

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            self.found = True
            return ""
        return None


def _holds_tensor(value: Any) -> bool:
    finder = _TensorFinder(io.BytesIO())
    finder.dump(value)
    return finder.found
