"""`TorchCheckpoint` opens files of torch.save for conversions and tools. torch.load says where tensors lie."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .._state.flatten import flatten_with_structure
from .._state.tensor_table import narrowed
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from .archive_entries import Entry, damage_named, entries, open_archive, verify_entry
from .checkpoint import Checkpoint, Chunk, Read, TensorInfo, cut
from .seen_files import SeenFiles

_SHARDS = b"ShardedTensor", b"DTensor"  #: classes, as pickles name them
_READ_BYTES = 64 << 20  # one read takes at most so many bytes, or one row


class TorchCheckpoint(Checkpoint):
    """A dict, nested or not. Keys are flattened as in DCP.

    Opening it reads only the pickle: torch.load maps the tensors to memory, which is never touched. Each storage is
    compared with its checksum once, before it is read.

    Raises `UntrustedCheckpointError` if loading needs to run code, `CorruptCheckpointError` for damage, and
    `CheckpointError` for other files, such as the shards of one rank.
    """

    format = "torch"

    def __init__(self, path: str) -> None:
        self.path, self.root = path, os.path.dirname(path)
        self._seen = SeenFiles()
        self._seen.look(path)
        self._archive = open_archive(path)
        found = entries(self._archive, path)
        self._pickle = _checked_pickle(self._archive, path)
        storages: list[torch.UntypedStorage] = []

        def keep(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            storages.append(storage)
            return storage

        values = self._load(keep, found)
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, no dict of tensors", path=path)
        begin = _mapping_of(storages[0].data_ptr()) if storages else 0
        self._entries = {begin + entry.offset: entry for entry in found}  # {address in the mapped memory: entry}
        self._sound: set[Entry] = set()
        self._flat, self.paths, self.structure = flatten_with_structure(values)
        self._tensors = {key: value for key, value in self._flat.items() if isinstance(value, torch.Tensor)}
        self._entry_of = {key: self._entry(key, tensor) for key, tensor in self._tensors.items()}
        self.tensors = {key: self._info(key, tensor) for key, tensor in self._tensors.items()}
        self.ties = self._ties()
        name = os.path.basename(path)
        self.objects = {key: Chunk((), (), name, -1, -1) for key in self._flat if key not in self.tensors}

    def _load(self, keep: Any, found: Sequence[Entry]) -> Any:
        path = self.path
        try:
            return torch.load(path, map_location=keep, weights_only=True, mmap=True)
        except Exception as error:  # a damaged pickle raises nearly anything
            if kind := next((kind for kind in _SHARDS if kind in self._pickle), None):
                raise CheckpointError(
                    f"{path} holds a {kind.decode()}, of which a rank saves its own shards only, so the file is "
                    "incomplete. On all ranks that wrote such files: state = torch.load(its file, weights_only=False), "
                    "then vescale_ckpt.save(folder, state)",
                    path=path,
                ) from error
            if isinstance(error, pickle.UnpicklingError):
                raise UntrustedCheckpointError(
                    f"{path} needs code to load, which conversions do not run (if you trust it, add its classes by "
                    f"torch.serialization.add_safe_globals): {error}"
                ) from error
            if "not resizable" in str(error):
                raise UntrustedCheckpointError(f"{path}: a tensor would reach beyond its storage: {error}") from error
            for entry in found:
                verify_entry(self._archive, entry, path, None)
            what = f"{type(error).__name__}: {error}"
            if "PytorchStreamReader" in what:
                raise CorruptCheckpointError(f"{path}: an entry is missing: {what}", key=None, file=path) from error
            raise CheckpointError(
                f"{path} is whole, but torch.load(weights_only=True, mmap=True) refuses it: {what}",
                path=path,
            ) from error

    def _entry(self, key: str, value: torch.Tensor) -> Entry:
        """Returns the archive's entry with a tensor's storage."""
        entry = None
        is_plain = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
        if is_plain and value.device.type == "cpu":
            entry = self._entries.get(value.untyped_storage().data_ptr())
        if entry is None:
            kind = f"{type(value).__name__} of layout {value.layout}"
            raise CheckpointError(f"{key}: a {kind} cannot be converted, or its data are missing", key=key)
        if not entry.stored:  # another tool has compressed it
            raise CheckpointError(f"{key}: its data are compressed in {self.path}: load it and save it again", key=key)
        if value.untyped_storage().nbytes() > entry.bytes:
            raise UntrustedCheckpointError(f"{key}: it would reach beyond its storage in {self.path}", key=key)
        return entry

    def _ties(self) -> dict[str, str]:
        first: dict[object, str] = {}
        ties: dict[str, str] = {}
        for key, tensor in self._tensors.items():
            box = tensor.storage_offset(), tensor.shape, tensor.stride()
            view = (self._entry_of[key], *box, tensor.dtype, tensor.is_conj(), tensor.is_neg())
            if tensor.numel() and (kept := first.setdefault(view, key)) != key:
                ties[key] = kept
        return ties

    def _info(self, key: str, tensor: torch.Tensor) -> TensorInfo:
        offset = self._entry_of[key].offset + int(tensor.storage_offset()) * tensor.itemsize
        shape, file = tuple(tensor.shape), os.path.basename(self.path)
        return TensorInfo(shape, tensor.dtype, [Chunk((0,) * len(shape), shape, file, offset, tensor.nbytes)])

    def close(self) -> None:
        self._flat, self._tensors = {}, {}
        self._archive.close()

    def load_objects(self, names: Iterable[str]) -> dict[str, Any]:
        return {key: self._object(key, self._flat[key]) for key in names}

    def _object(self, key: str, value: Any) -> Any:
        """Returns an object whose tensors lie in memory of their own."""
        read: dict[int, torch.UntypedStorage] = {}
        for storage in _storages_within(value):
            if entry := self._entries.get(storage.data_ptr()):
                self._verify(entry, key)
                read[storage._cdata] = _read_storage(self.path, key, entry.offset, storage.nbytes())
        memo: dict[Any, Any] = {"torch": read}  # where torch looks for copies of storages
        return copy.deepcopy(value, memo) if read else value

    def check(self, key: str) -> None:
        """Compares the data of a tensor with their checksum."""
        self._verify(self._entry_of[key], key)
        self._seen.check([self.path])

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            self._verify(self._entry_of[read.key], read.key)
        for read in reads:
            view = narrowed(self._tensors[read.key], read.offsets, read.target.shape)
            _read_mapped(self.path, read.key, self._entry_of[read.key].offset, view, read.target)
        self._seen.check([self.path])

    def _verify(self, entry: Entry, key: str) -> None:
        if entry not in self._sound:
            verify_entry(self._archive, entry, self.path, key)
            self._sound.add(entry)


def _checked_pickle(archive: zipfile.ZipFile, path: str) -> bytes:
    """Returns the pickle. Verifies its checksum and the byte order: torch.load compares no checksums, and would swap
    the bytes of the mapped file in memory."""
    names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise CheckpointError(f"{path} is an archive, but none of torch.save", path=path)
    byteorder = names[0].removesuffix("data.pkl") + "byteorder"
    with damage_named(path):  # zipfile compares checksums
        content = archive.read(names[0])
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise CheckpointError(f"{path} was saved on a big-endian machine: load it and save it again", path=path)
    return content


def _mapping_of(address: int) -> int:
    """Returns the address of the first byte of the file that is mapped at `address`. torch has no call for it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin_and_end, _, offset, *_ = line.split(maxsplit=5)
            begin, end = (int(text, 16) for text in begin_and_end.split("-"))
            if begin <= address < end:
                return begin - int(offset, 16)
    raise CheckpointError("/proc/self/maps does not tell where a file is mapped to memory")


def _storages_within(value: Any) -> list[torch.UntypedStorage]:
    """The storages of all tensors within an object."""
    found: list[torch.UntypedStorage] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            if isinstance(value, torch.Tensor):
                value = value.untyped_storage()
            elif isinstance(value, torch.TypedStorage):
                value = value._untyped_storage
            if not isinstance(value, torch.UntypedStorage):
                return None
            found.append(value)
            return ""

    Finder(io.BytesIO()).dump(value)
    return found


# --- Values of tensors that torch has mapped from a file
#
# An access to mapped memory beyond the end of a file ends the process (SIGBUS), and any file may be cut short while it
# is read. So the mapped memory is never touched: tensors in it tell where their values lie in the file.


def _read_mapped(path: str, key: str, begin: int, view: torch.Tensor, target: torch.Tensor) -> None:
    """Fills `target` with the values of `view`, whose storage begins at the byte `begin` of the file `path`.

    Raises `CorruptCheckpointError` if the file ends before them, and `CheckpointError` if it cannot be read.
    """
    view, target = view.detach(), target.detach()
    if not view.numel():
        return
    strides = view.stride()
    order = sorted(range(view.dim()), key=lambda dim: -strides[dim])  # so that a piece lies together in the file
    view, target = view.permute(order), target.permute(order)
    most = max(1, _READ_BYTES // view.itemsize * view.numel() // _extent(view))
    with damage_named(path, key, begin), open(path, "rb", buffering=0) as file:
        for offsets, sizes in cut(tuple(view.shape), most):
            piece = narrowed(view, offsets, sizes)
            at = begin + int(piece.storage_offset()) * piece.itemsize
            found = torch.empty(_extent(piece) * piece.itemsize, dtype=torch.uint8, device="cpu")
            _read(file.fileno(), at, found)
            values = found.view(piece.dtype).as_strided(piece.shape, piece.stride())
            values = values.conj() if piece.is_conj() else values
            narrowed(target, offsets, sizes).copy_(torch._neg_view(values) if piece.is_neg() else values)


def _read_storage(path: str, key: str, begin: int, length: int) -> torch.UntypedStorage:
    """Returns a storage with `length` bytes of a file. Raises as `_read_mapped`."""
    found = torch.empty(length, dtype=torch.uint8, device="cpu")
    with damage_named(path, key, begin), open(path, "rb", buffering=0) as file:
        _read(file.fileno(), begin, found)
    return found.untyped_storage()


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _read(descriptor: int, begin: int, target: torch.Tensor) -> None:
    """Fills a dense tensor of bytes from a file."""
    array: Any = (ctypes.c_ubyte * target.numel()).from_address(target.data_ptr())  # needs no numpy
    left = memoryview(array).cast("B")
    while left:
        count = os.preadv(descriptor, [left], begin)
        if not count:
            raise EOFError(f"the file ends at {begin:,}, before the end of the values")
        left, begin = left[count:], begin + count
