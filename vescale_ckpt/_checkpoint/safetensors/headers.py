"""Reads the headers of safetensors files, and lists their tensors with record locations, for load planning.

Such a checkpoint is one file, or a directory without `.metadata`: the files that the `weight_map` of its
`*.safetensors.index.json` names, or without an index all `*.safetensors`. A tensor is whole in one file, or consists of
chunks in several files. torch's `HuggingFaceStorageWriter` writes the offsets of chunks into their headers. Headers and
indexes are untrusted. Links may lead out of the directory, as in snapshots of a hub; names may not.

The contents are names, record locations and a CRC-32 of each file's header. One rank can read all headers for the
others. A read detects a file that was replaced after planning. There is no lock: exports replace files while others
read them, and a reader that has planned with the old files starts again.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..._engine import _C
from ..._engine.engine_errors import named_errors, translate
from ..._engine.options import direct_io_setting, engine_options
from ..._engine.rows import CODES, DTYPE_NAMES, ITEM_BYTES, MOST_BYTES, SHARD, TENSOR, int_table
from ..._ranks.message import pack, unpack
from ..._state.chunk_rows import ShardChunk, overlapping_chunk, packed_row
from ..._storage.open_storage import is_file, read_twice, stat_of, storage_at
from ..._storage.paths import check_relative
from ...errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError, some
from ..quantized_names import config_of, scales_of
from . import header_texts, model_names

logger = logging.getLogger(__name__)

_CONFIG = "config.json"

_MOST_JSON_BYTES = 100_000_000  # a larger index is refused; the format has this limit for headers
ATTEMPTS = 5  #: a directory is read so often if exports into it commit meanwhile
_MOST_OPEN = 64  # files whose headers are merged at once; more are read one after the other
_OPENERS = 8  # threads that read headers: headers are small, and most of the time is latency

OnError = Callable[[CheckpointError], None]


class ExportedMeanwhileError(CheckpointError):
    """Exports have replaced the model of a folder while it was read. Nothing is damaged."""


@dataclass(frozen=True)
class HeaderTables:
    """The contents of the headers of a checkpoint's safetensors files. Equal fields mean equal headers."""

    root: str  #: `files` are relative to this directory
    inventory: bytes  #: it has an item for each chunk of a tensor
    locations: bytes  #: file, offset, length of each item, and the CRC-32 of the file's header
    files: list[str]
    aliases: dict[str, str]  #: {other name: stored name} of shared (tied) weights
    quantization: str = ""  #: `quantization_config` of the model's `config.json` as JSON, if tensors seem quantised

    @classmethod
    def read(cls, path: str, verify: bool, on_error: OnError | None = None) -> HeaderTables:
        """Reads the headers. With `on_error`, errors of one file go to it, and the other files are read.

        Raises `CheckpointError`, `CorruptCheckpointError`, `UntrustedCheckpointError`.
        """
        if is_file(path):
            root, name = os.path.split(path)
            return _Reading(root, verify, on_error).contents([name], None)
        for _ in range(ATTEMPTS):
            stamp = _stamp(path)
            errors: list[CheckpointError] = []
            try:
                found = cls._read_directory(path, verify, None if on_error is None else errors.append)
            except CheckpointError:
                if _stamp(path) == stamp:
                    raise
                continue
            if _stamp(path) == stamp:
                for error in errors:
                    assert on_error is not None
                    on_error(error)
                return found
        raise ExportedMeanwhileError(f"{path}: exports into it follow each other faster than it can be read", path=path)

    @classmethod
    def _read_directory(cls, path: str, verify: bool, on_error: OnError | None) -> HeaderTables:
        names = storage_at(path).names()
        index = _index_name(path, names)
        weight_map = None if index is None else _weight_map(os.path.join(path, index))
        if weight_map is not None and not model_names.single_file_counts(names, set(weight_map.values())):
            return _Reading(path, verify, on_error).contents(sorted(set(weight_map.values())), weight_map)
        if model_names.holds_unfinished_export(path):
            raise CheckpointError(
                f"{path} has files of a model but no index of them: it holds an export that did not finish",
                path=path,
            )
        files = model_names.without_index(names)
        left_out = [name for name in names if name.endswith(model_names.SUFFIX) and name not in files]
        if index is None and (others := sorted(name for name in left_out if not model_names.is_model_file(name))):
            logger.warning("%s: %s alone is its model, %s are not read", path, files[0], some(others))
        return _Reading(path, verify, on_error).contents(files, None)

    def index(self) -> _C.Index:
        """Returns the contents as an index, for loads and listings. Its id is equal for equal headers."""
        save_id = f"safetensors {blake2b(self.pack(), digest_size=16).hexdigest()}"
        with named_errors(str, self.root):
            return _C.Index.from_rows(self.inventory, self.locations, self.files, save_id)

    def pack(self) -> bytes:
        """The contents as bytes, for other ranks."""
        rest = json.dumps([self.files, self.aliases, self.quantization], sort_keys=True).encode()
        return pack(self.inventory, self.locations, rest)

    @classmethod
    def unpack(cls, path: str, message: bytes) -> HeaderTables:
        inventory, locations, rest = unpack(message)
        files, aliases, quantized = json.loads(rest)
        root = os.path.dirname(path) if is_file(path) else path
        return cls(root, inventory, locations, files, aliases, quantized)


@dataclass
class _Header:
    """The needed contents of one file's header."""

    crc: int
    ties: Mapping[str, str]  #: {other name: name of a tensor}
    #: {name: (dtype code, shape, range in the file)}
    tensors: dict[str, tuple[int, tuple[int, ...], tuple[int, int]]]
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)  #: {name: offset} of chunks of larger tensors


@dataclass
class _Stored:
    """A tensor and all its stored chunks."""

    code: int  #: dtype code
    dims: int
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int, int]]]  #: offset, size, record location


class _Reading:
    """Reads the headers of some files and merges them into the contents of one checkpoint."""

    def __init__(self, root: str, verify: bool, on_error: OnError | None) -> None:
        self.root = root
        self.verify = verify
        self.on_error = on_error
        self.options = engine_options(None, direct_io_setting("auto"))
        self.stored: dict[str, _Stored] = {}
        self.files: list[str] = []
        self.keys_of: dict[str, list[str]] = {}  # {file: keys} in the index

    def contents(self, files: list[str], weight_map: Mapping[str, str] | None) -> HeaderTables:
        for name in files:
            check_relative(name, name)
        self.files = files
        for key, name in (weight_map or {}).items():
            self.keys_of.setdefault(name, []).append(key)
        if self.on_error is None and len(files) <= _MOST_OPEN and (tables := self._of_whole_tensors(weight_map)):
            return tables
        aliases: dict[str, tuple[str, str]] = {}  # {other name: (stored name, file that says so)}
        with ThreadPoolExecutor(_OPENERS, thread_name_prefix="vescale_ckpt") as pool:
            headers = [pool.submit(self._header, name) for name in files]
            for index, (name, reading) in enumerate(zip(files, headers, strict=True)):
                try:
                    header = reading.result()
                    for alias, key in header.ties.items():
                        if alias not in header.tensors and key in header.tensors:
                            aliases[alias] = key, name
                    keys = header.tensors.keys() if weight_map is None else self.keys_of[name]
                    self._add(index, header, keys, aliases)
                except CheckpointError as error:
                    if self.on_error is None:
                        raise
                    self.on_error(error)
        kept = {alias: key for alias, (key, _) in aliases.items() if alias not in self.stored and key in self.stored}
        return self._packed(kept)

    def _of_whole_tensors(self, weight_map: Mapping[str, str] | None) -> HeaderTables | None:
        """Returns the contents without Python code for each tensor, if each is whole under one name, as in most models.
        None: the headers have to be read name by name, also to name what is wrong."""
        with ThreadPoolExecutor(_OPENERS, thread_name_prefix="vescale_ckpt") as pool:
            files = list(pool.map(self._open, self.files))
        texts = [file.metadata() or {} for file in files]
        if any(header_texts.SHARDING_INFO in of or of.get(header_texts.TIED_NAMES, "{}") != "{}" for of in texts):
            return None
        keys = None if weight_map is None else [self.keys_of[name] for name in self.files]
        found = _C.header_rows(files, keys)
        if found is None:
            return None
        names, codes, inventory, locations = found
        quantization = self._quantization(dict(zip(names, codes, strict=True)))
        return HeaderTables(self.root, inventory, locations, self.files, {}, quantization)

    def _open(self, name: str) -> _C.SafetensorsFile:
        path = os.path.join(self.root, name)
        try:
            return read_twice(path, lambda: _C.SafetensorsFile.open(path, self.options, self.verify))
        except _C.EngineError as error:
            if error.errno == errno.ENOENT:
                key = next(iter(self.keys_of.get(name, ())), None)
                what = f"{path} is missing" if key is None else f"{key}: {path} is missing, where the index says it is"
                raise CorruptCheckpointError(what, key=key, file=path) from None
            raise translate(error, str, path, 0) from None

    def _header(self, name: str) -> _Header:
        path, file = os.path.join(self.root, name), self._open(name)
        tensors = {}
        for number, (key, dtype, torch_name, _) in enumerate(file.tensors()):
            code = CODES.get(torch_name)
            if code is None:
                raise CheckpointError(f"{key}: torch has no dtype for {dtype}", key=key, path=path)
            with named_errors(str, path):
                tensors[key] = code, file.torch_shape(number), file.range(number)
        metadata = file.metadata() or {}
        header = _Header(file.head_crc, _ties(metadata, path), tensors)
        if header_texts.SHARDING_INFO in metadata:
            header.offsets = _offsets(metadata[header_texts.SHARDING_INFO], tensors, path)
        return header

    def _add(self, file: int, header: _Header, keys: Iterable[str], aliases: Mapping[str, tuple[str, str]]) -> None:
        name = self.files[file]
        for key in keys:
            if key not in header.tensors:
                if aliases.get(key, ("", ""))[1] == name:
                    continue
                path = os.path.join(self.root, name)
                raise CorruptCheckpointError(
                    f"{key}: the index says that it is in {path}, which has no such tensor", key=key, file=path
                )
            code, size, (at, length) = header.tensors[key]
            offset = header.offsets.get(key, (0,) * len(size))
            stored = self.stored.setdefault(key, _Stored(code, len(size), []))
            if (stored.code, stored.dims) != (code, len(size)):
                raise self._contradiction(key, stored, file, "of another dtype or number of dimensions")
            stored.chunks.append((offset, size, (file, at, length, header.crc)))

    def _packed(self, aliases: dict[str, str]) -> HeaderTables:
        names: list[str] = []
        rows: list[bytes] = []
        locations = int_table()
        for key, stored, of in [
            *((key, stored, key) for key, stored in self.stored.items()),
            *((alias, self.stored[key], key) for alias, key in aliases.items()),
        ]:
            try:
                chunks, shape = self._disjoint(of, stored), self._shape(of, stored)
            except CheckpointError as error:
                if self.on_error is None:
                    raise
                if key == of:
                    self.on_error(error)
                continue
            item_bytes = ITEM_BYTES[stored.code]
            for offset, size, place in chunks:
                kind = TENSOR if size == shape else SHARD
                names.append(key)
                rows.append(packed_row(kind, stored.code, False, item_bytes, ShardChunk(offset, size, ()), shape))
                locations.extend(place)
        inventory = _C.pack_inventory(names, rows, 0)
        quantization = self._quantization({key: stored.code for key, stored in self.stored.items()})
        return HeaderTables(self.root, inventory, locations.tobytes(), self.files, aliases, quantization)

    def _quantization(self, codes: Mapping[str, int]) -> str:
        """Returns `quantization_config`, if a tensor seems quantised; one that cannot be read is of no known method.
        `codes`: the dtype code of each tensor."""
        small = [(key, DTYPE_NAMES[code]) for key, code in codes.items() if ITEM_BYTES[code] == 1]
        if not any(scales_of(key, dtype, codes) for key, dtype in small):
            return ""
        try:
            _, content = storage_at(self.root).read_range(_CONFIG, 0, _MOST_JSON_BYTES + 1)
            return config_of(_json(content.decode()))
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, RecursionError) as error:
            return json.dumps({"quant_method": f"unknown: {_CONFIG} cannot be read ({error})"})

    def _disjoint(self, key: str, stored: _Stored) -> list[Any]:
        """Returns the chunks that have elements, or one chunk if none has any. Raises if two overlap."""
        chunks = [chunk for chunk in stored.chunks if 0 not in chunk[1]] or stored.chunks[:1]
        if (overlapping := overlapping_chunk([(offset, size) for offset, size, _ in chunks])) is not None:
            raise self._contradiction(key, stored, chunks[overlapping][2][0], "too")
        return chunks

    def _shape(self, key: str, stored: _Stored) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, which no file holds: the largest end of its chunks. Raises if it is
        impossibly large."""
        shape = tuple(max(offset[dim] + size[dim] for offset, size, _ in stored.chunks) for dim in range(stored.dims))
        if math.prod(max(length, 1) for length in shape) * ITEM_BYTES[stored.code] >= MOST_BYTES:
            path = os.path.join(self.root, self.files[stored.chunks[0][2][0]])
            raise UntrustedCheckpointError(
                f"{key}: no tensor has shape {shape}, which {path} gives it", key=key, path=path
            )
        return shape

    def _contradiction(self, key: str, stored: _Stored, file: int, what: str) -> CheckpointError:
        others = [self.files[chunk[2][0]] for chunk in stored.chunks if chunk[2][0] != file] or [self.files[file]]
        return CheckpointError(
            f"{key}: {others[0]} in {self.root} holds it, and {self.files[file]} {what}: nothing says which of them "
            "counts. Load one file by its own path, or add an index",
            key=key,
            path=self.root,
        )


def _ties(metadata: Mapping[str, str], path: str) -> Mapping[str, str]:
    """Returns {other name: possible name of a tensor}. The caller drops names of tensors that the file lacks."""
    if (text := metadata.get(header_texts.TIED_NAMES)) is None:
        return metadata
    try:
        ties = _json(text)
        if not isinstance(ties, dict) or not all(isinstance(name, str) for name in ties.values()):
            raise TypeError("no object of names")
    except (ValueError, TypeError, RecursionError) as error:
        raise UntrustedCheckpointError(
            f"{path}: its {header_texts.TIED_NAMES} is malformed: {error!r}", path=path
        ) from None
    return ties


def _offsets(text: str, tensors: Mapping[str, Any], path: str) -> dict[str, tuple[int, ...]]:
    """Returns {name: offset} of tensors that are chunks of larger tensors."""

    def offset_of(key: str, entry: Any) -> tuple[int, ...]:
        offset, size = tuple(entry[header_texts.SHARDING_OFFSETS]), tensors[key][1]
        if len(offset) != len(size) or not all(
            type(start) is int and 0 <= start < MOST_BYTES - length for start, length in zip(offset, size, strict=True)
        ):
            raise ValueError(f"{key} cannot begin at {offset}")
        return offset

    try:
        return {key: offset_of(key, entry) for key, entry in _json(text).items() if key in tensors}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UntrustedCheckpointError(
            f"{path}: its {header_texts.SHARDING_INFO} is malformed: {error!r}", path=path
        ) from None


def _stamp(directory: str) -> list[tuple[int, ...] | None]:
    """Returns a value that changes when an export into the directory commits."""
    stamp: list[tuple[int, ...] | None] = []
    for name in (model_names.SINGLE_NAME, model_names.INDEX_NAME):
        try:
            found = storage_at(directory).stat(name)
            stamp.append((*found.identity, found.changed_ns))
        except OSError:
            stamp.append(None)
    return stamp


def _index_name(directory: str, found: Iterable[str]) -> str | None:
    names = [name for name in found if name.endswith(model_names.INDEX_SUFFIX)]
    if len(names) <= 1 or model_names.INDEX_NAME in names:
        return None if not names else model_names.INDEX_NAME if model_names.INDEX_NAME in names else names[0]
    raise CheckpointError(
        f"{directory} has several indexes and no {model_names.INDEX_NAME}: {', '.join(sorted(names))}", path=directory
    )


def _weight_map(path: str) -> dict[str, str]:
    """The file of each tensor, from an index. Raises `CheckpointError` if it cannot be read or is not sound."""
    try:
        directory, name = os.path.split(path)
        found = stat_of(path)
        if not found.is_file or found.size > _MOST_JSON_BYTES:
            raise UntrustedCheckpointError(
                f"{path} is no index: expected a file of at most {_MOST_JSON_BYTES:,} bytes", path=path
            )
        _, content = storage_at(directory).read_range(name, 0, _MOST_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error
    try:
        weight_map = _json(content.decode())["weight_map"]
        if not isinstance(weight_map, dict):
            raise TypeError("its weight_map is no object")
        for key, name in weight_map.items():
            check_relative(name, key)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is no sound index: {error!r}", key=None, file=path) from None
    return weight_map


def _json(text: str) -> Any:
    """Parses JSON. Raises ValueError also for an object that has a key twice."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice} is there twice")
    return result
