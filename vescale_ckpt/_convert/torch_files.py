"""Reads files of torch.save, by mapping them with torch.load, and lays them out, for conversions."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.serialization import skip_data

from .._engine import _C
from .._state import objects
from .._state.flatten import flatten, flatten_with_structure, nested
from .._state.structure import Path, Structure
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from .archive import ArchiveLayout, Entry, Member, damage_named, entries
from .plan import Output
from .raw_files import Area, RawFiles, RawTensor
from .source import Read, Source, TensorInfo


class TorchSource(Source):
    """A dict, nested or not, that torch.load maps to memory. Keys are flattened as DCP does.

    Opening it reads the pickle only. Tensors that are not stored contiguously (transposed ones, say) and tensors within
    objects are read through the mapping, after verification.
    """

    format = "torch"

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = RawFiles([path], path)
        state = MappedState(path)
        self._flat, self.paths, self.structure = flatten_with_structure(state.values)
        self._raw = {
            key: _raw(key, value, state) for key, value in self._flat.items() if isinstance(value, torch.Tensor)
        }
        self.tensors = {key: tensor.info for key, tensor in self._raw.items()}
        self.object_names = [key for key in self._flat if key not in self._raw]

    def location(self, key: str) -> tuple[str, int, int]:
        return self._files.location(self._raw[key])

    def close(self) -> None:
        self._flat, self._raw = {}, {}

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        found = {key: self._flat[key] for key in names}
        if any(map(_holds_tensor, found.values())):
            wrong, offset, _, _ = _C.check_archive_at(self._path, 0, os.path.getsize(self._path), -1)
            if wrong:
                raise CorruptCheckpointError(f"{self._path}: {wrong}", key=None, file=self._path, offset=offset)
        return found

    def read(self, reads: Sequence[Read]) -> None:
        self._files.read(reads, self._raw.__getitem__)


class MappedState:
    """The dict in a file of torch.save, mapped to memory. Its tensors are not read yet.

    Raises `UntrustedCheckpointError` if loading needs to run code, `CorruptCheckpointError` for damage, and
    `CheckpointError` for other files.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries = entries(path)
        self._by_offset = {entry.offset: entry for entry in self.entries}
        _check_pickle(path, self.entries)
        storages: list[torch.UntypedStorage] = []

        def keep(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            storages.append(storage)
            return storage

        values = _load(path, keep)
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, no dict of tensors", path=path)
        self.values: Mapping[str, Any] = values
        self._address = _mapping_of(storages[0].data_ptr()) if storages else 0  # of the file's first byte

    def entry_of(self, tensor: torch.Tensor) -> Entry | None:
        """The archive's entry with a tensor's storage. None for a tensor without data in the file."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return None
        return self._by_offset.get(tensor.untyped_storage().data_ptr() - self._address)


def _raw(key: str, value: torch.Tensor, state: MappedState) -> RawTensor:
    entry = state.entry_of(value)
    if entry is None or value.is_quantized:
        kind = f"{type(value).__name__} of layout {value.layout}"
        raise CheckpointError(f"{key}: a {kind} cannot be converted, or its data are missing", key=key)
    if not entry.stored:  # another tool has compressed it
        raise CheckpointError(f"{key}: its data are compressed in {state.path}: load it and save it again", key=key)
    if value.untyped_storage().nbytes() > entry.bytes:
        raise UntrustedCheckpointError(f"{key}: it would reach beyond its storage in {state.path}", key=key)
    area = Area(0, entry.offset, entry.bytes, entry.crc or -1)
    offset = entry.offset + int(value.storage_offset()) * value.itemsize
    lies_as_it_is = value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return RawTensor(TensorInfo(tuple(value.shape), value.dtype), offset, area, None if lies_as_it_is else value)


def _check_pickle(path: str, stored: Sequence[Entry]) -> None:
    """Verifies the pickle's checksum and the byte order. torch.load does not compare checksums, and would swap the
    bytes of the mapped file in memory."""
    names = [entry.name for entry in stored if entry.name.endswith("/data.pkl")]
    if len(names) != 1:
        raise CheckpointError(f"{path} is an archive, but none of torch.save", path=path)
    byteorder = names[0].removesuffix("data.pkl") + "byteorder"
    with damage_named(path), zipfile.ZipFile(path) as archive:  # zipfile compares checksums
        archive.read(names[0])
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise CheckpointError(f"{path} was saved on a big-endian machine: load it and save it again", path=path)


def _load(path: str, keep: Any) -> Any:
    try:
        return torch.load(path, map_location=keep, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UntrustedCheckpointError(
            f"{path} needs code to load, which conversions do not run (if you trust it, add its classes by "
            f"torch.serialization.add_safe_globals): {error}"
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        if "not resizable" in str(error):
            raise UntrustedCheckpointError(f"{path}: a tensor would reach beyond its storage: {error}") from error
        raise CorruptCheckpointError(
            f"{path} cannot be read, its data are damaged or missing: {type(error).__name__}: {error}",
            key=None,
            file=path,
        ) from error


def _mapping_of(address: int) -> int:
    """The address of the first byte of the file that is mapped at `address`. torch has no call for it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin_and_end, _, offset, *_ = line.split(maxsplit=5)
            begin, end = (int(text, 16) for text in begin_and_end.split("-"))
            if begin <= address < end:
                return begin - int(offset, 16)
    raise CheckpointError("/proc/self/maps does not tell where a file is mapped to memory")


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


# --- Writing


_ALIGNMENT = 64


def torch_layout(
    outputs: Sequence[Output], values: Mapping[str, Any], paths: Mapping[str, Path], structure: str | None = None
) -> ArchiveLayout:
    """The archive that torch.save writes for a dict of these tensors and objects, nested according to `paths`.

    torch.save itself writes the archive, without the tensors' bytes, to a sparse file in memory. Its entries are then
    the layout. Raises `CheckpointError` for objects that torch.save cannot store.
    """
    descriptor = os.memfd_create("vescale_ckpt")
    try:
        path = f"/proc/self/fd/{descriptor}"
        tensors = _without_memory(outputs)
        state = nested({**tensors, **values}, paths, None if structure is None else Structure.unpack(structure))
        try:
            with skip_data():
                torch.save(state, path)
        except Exception as error:
            raise CheckpointError(f"torch.save does not store this: {type(error).__name__}: {error}") from error
        written = MappedState(path)
        found, kept = written.entries, flatten(written.values)[0]
        at: dict[int, Output | bytes] = {}
        for output in outputs:
            entry = written.entry_of(kept[output.name])
            assert entry is not None
            at[entry.offset] = output
        rest = [entry for entry in found if _is_storage(entry) and entry.offset not in at]
        at.update(_storages_of_objects(rest, [values[key] for key in kept if key in values]))
        with zipfile.ZipFile(path) as archive:
            return ArchiveLayout("archive/", [_member(entry, at.get(entry.offset), archive) for entry in found])
    finally:
        os.close(descriptor)


def _without_memory(outputs: Sequence[Output]) -> dict[str, torch.Tensor]:
    """Tensors in reserved address space. They take no memory as long as they are not read."""
    reserved = mmap.mmap(-1, sum(map(_room, outputs)) or 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    tensors, at = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the tensors are not writable
        for output in outputs:
            if output.bytes:
                memory = torch.frombuffer(reserved, dtype=torch.uint8, count=output.bytes, offset=at)
                tensors[output.name] = memory.view(output.dtype).view(output.shape)
                at += _room(output)
            else:
                tensors[output.name] = torch.empty(output.shape, dtype=output.dtype, device="cpu")
    return tensors


def _room(output: Output) -> int:
    return -(-output.bytes // _ALIGNMENT) * _ALIGNMENT


def _member(entry: Entry, content: Output | bytes | None, archive: zipfile.ZipFile) -> Member:
    name = entry.name.partition("/")[2]
    if isinstance(content, Output):
        if content.bytes != entry.bytes:
            raise CheckpointError(f"{content.name}: torch.save wants {entry.bytes} bytes for it, not {content.bytes}")
        return Member(name, b"", content)
    return Member(name, archive.read(entry.name) if content is None else content)


def _is_storage(entry: Entry) -> bool:
    return entry.name.partition("/")[2].startswith("data/")


def _storages_of_objects(rest: Sequence[Entry], values: Sequence[Any]) -> dict[int, Output | bytes]:
    """The bytes of tensors within objects, which torch.save has left out, too; by offset of their entry."""
    if not rest:
        return {}
    contents = []
    for value in values:
        with zipfile.ZipFile(io.BytesIO(objects.dump(value, "an object", tells=False))) as archive:
            names = [name for name in archive.namelist() if name.partition("/")[2].startswith("data/")]
            contents += [archive.read(name) for name in names]
    if [len(content) for content in contents] != [entry.bytes for entry in rest]:
        raise CheckpointError("objects that share tensors with each other cannot be converted to a file of torch.save")
    return {entry.offset: content for entry, content in zip(rest, contents, strict=True)}
