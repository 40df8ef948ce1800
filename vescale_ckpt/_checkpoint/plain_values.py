"""Reads plain objects of checkpoints (numbers, texts, short lists of them) without running code and without torch."""

from __future__ import annotations

import io
import pickle
from typing import Any

from .._engine import _C
from .._storage.open_storage import storage_at
from .checkpoint import Checkpoint

MOST_VALUES = 200  #: a listing reads the values of so many objects
MOST_REQUESTED = 20  #: of so many in an object store, where each is a request
_MOST_BYTES = 8 << 10  # longer records are no short values
_MOST_ELEMENTS = 16
_SCALARS = (bool, int, float, str, type(None))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


def plain_value(checkpoint: Checkpoint, key: str) -> Any:
    """Returns the value of an object of a native checkpoint; None if it is not plain, damaged, or cannot be read."""
    chunk = checkpoint.objects[key]
    if not 0 < chunk.bytes <= _MOST_BYTES or chunk.is_transformed:
        return None
    try:
        _, record = storage_at(checkpoint.root).read_range(chunk.file, chunk.offset, chunk.bytes)
        content = _C.archive_pickle(record) if chunk.crc < 0 or _C.crc32(record) == chunk.crc else None
        if content is None or _C.check_pickle(content)[0]:
            return None
        value = _Unpickler(io.BytesIO(content)).load()
    except Exception:  # a damaged pickle raises nearly anything
        return None
    return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= _MOST_ELEMENTS and all(type(item) in _SCALARS for item in value)
    if type(value) is dict:
        return _is_plain(list(value.values())) and all(type(key) is str for key in value)
    return type(value) in _SCALARS
