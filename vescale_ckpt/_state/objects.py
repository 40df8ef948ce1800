"""Writes objects that are not tensors as `torch.save` does, for saves, and reads them for loads without trusting them.

A training state has hundreds of small numbers and strings, and `torch.save` and `torch.load` take 0.2 ms for each. For
plain values C++ writes and opens the same archive with the same pickle, which is faster.
"""

from __future__ import annotations

import io
import logging
import pickle
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from .._engine import _C
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError, some
from . import trusted_types

logger = logging.getLogger(__name__)

_SCALARS = (int, float, str, bool, bytes, type(None))
_MAX_PLAIN_ITEMS = 256


def _is_plain(value: Any) -> bool:
    """Whether `value` consists of a few exact builtins, so that its pickle names no class."""
    budget = _MAX_PLAIN_ITEMS
    stack = [value]
    while stack:
        value = stack.pop()
        budget -= 1
        if budget < 0:
            return False
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is list or kind is tuple:
            stack.extend(value)
        elif kind is dict:
            stack.extend(value.keys())
            stack.extend(value.values())
        else:
            return False
    return True


def dump(value: object, key: str, *, tells: bool = True) -> bytes:
    """Returns the bytes that `torch.save` writes for `value`: `torch.load(io.BytesIO(dump(x, "x")))` returns `x`.

    Raises `CheckpointError` with the key if it cannot be pickled. `tells`: whether to warn, once a key, if loads with
    `weights_only=True` will refuse it.
    """
    if _is_plain(value):
        return _C.object_record(pickle.dumps(value, protocol=2))
    buffer, recorder = io.BytesIO(), trusted_types.Recorder()
    try:
        torch.save(value, buffer, pickle_module=recorder)
    except Exception as error:
        raise CheckpointError(
            f"{key}: a {type(value).__name__} cannot be saved, because it does not pickle (save what it consists of, "
            f"or leave it out): {type(error).__name__}: {error}",
            key=key,
        ) from error
    if recorder.refused and tells:
        _warn_of_refusal(key, some(list(recorder.refused)))
    return buffer.getvalue()


@lru_cache(maxsize=1024)
def _warn_of_refusal(key: str, names: str) -> None:
    logger.warning(
        "%s holds objects that take code to load (%s): loads refuse them unless they get weights_only=False, which "
        "trusts the checkpoint, or the classes are added by torch.serialization.add_safe_globals",
        key,
        names,
    )


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes as text of {encoding!r}")
    return text.encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings and containers. Raises `UnpicklingError` for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2 has no bytes: it encodes text, or calls bytes() for empty ones.
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if module in ("__builtin__", "builtins") and name == "bytes":
            return trusted_types.no_bytes
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


def load_plain(data: bytes) -> tuple[bool, Any]:
    """Returns whether the object in an archive is plain, and the object. Builds nothing of other classes."""
    pickled = _C.archive_pickle(data)
    if pickled is None or _C.check_pickle(pickled)[0]:
        return False, None
    try:
        return True, _PlainUnpickler(io.BytesIO(pickled)).load()
    except Exception:  # the value is not plain, or damaged: torch.load decides
        return False, None


def load(data: bytes, *, weights_only: bool, key: str) -> Any:
    """Returns the object in an archive of `torch.save`.

    `weights_only`: builds only classes that torch or `trusted_types` allow, and raises `UntrustedCheckpointError` for
    others. Raises `CorruptCheckpointError` if `data` is no such archive.
    """
    plain, value = load_plain(data)
    if plain:
        return value
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if weights_only and isinstance(error, pickle.UnpicklingError):
            with suppress(Exception):
                if b"torch.distributed." in data:  # the import registers its classes (placements) as safe
                    import_module("torch.distributed.tensor")
                    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            with suppress(Exception):
                return trusted_types.load(data)
            raise UntrustedCheckpointError(
                f"object {key!r} needs code to load, which weights_only=True forbids (if you trust the checkpoint, "
                f"pass weights_only=False or add the class by torch.serialization.add_safe_globals): "
                f"{error}",
                key=key,
            ) from error
        raise CorruptCheckpointError(
            f"object {key!r} cannot be read: {type(error).__name__}: {error}", key=key, file=""
        ) from error
