"""Unpickles `.metadata` without running code from it: imports only what metadata consists of, and no DCP.

`metadata_pickle` gives DCP's classes. `load_places` gives classes of its own, because DCP's take a second to import.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
from typing import Any

import torch

from ..._engine.gc import gc_paused
from ...errors import CorruptCheckpointError, UntrustedCheckpointError
from .metadata_check import check

_METADATA = "torch.distributed.checkpoint.metadata"
# DCP metadata of any torch version has only these classes, beside `TensorProperties` and `_StorageInfo`.
_METADATA_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "ChunkStorageMetadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "StorageMeta",
)
_PROPERTIES_MODULES = (_METADATA, "torch.distributed._shard.sharded_tensor.metadata")  # torch < 2.3
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
#: The modules of classes that plans consist of. Only attributes that no load needs may hold their objects.
_PLANS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.", "nvidia_resiliency_ext.checkpointing.")


class StandIn:
    """Replaces an object of a plan: accepts any arguments and any state, and drops them."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Unused(Exception):
    """Replaces objects that a reader does not need. Exceptions accept any arguments without running Python code."""


def _get_layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"it names an unknown tensor layout {name!r}")
    return layout


def _memory_format(number: int) -> None:
    """Replaces the enumeration of memory formats, a field that torch no longer uses."""


def _memory_format_named(enumeration: Any, name: Any) -> None:
    """Replaces `getattr`, with which Python 3.11.0 to 3.11.3 pickle members of enumerations."""
    if isinstance(enumeration, type) and issubclass(enumeration, StandIn):
        return
    if enumeration is not _memory_format or type(name) is not str:
        raise refused("builtins", "getattr")


def _plain_path(*parts: str) -> str:
    """Replaces pathlib's classes, which stock files have in `storage_meta.checkpoint_id`. The path is not used."""
    if sum(map(len, parts)) + len(parts) > 4096:
        raise pickle.UnpicklingError("it holds a path that is longer than 4096 characters")
    return "/".join(parts)


class MetadataUnpickler(pickle.Unpickler):
    def class_of(self, name: str) -> Any:
        """Returns what stands for a class of DCP's metadata, of `TensorProperties` or of `_StorageInfo`."""
        raise NotImplementedError

    def find_class(self, module: str, name: str) -> Any:
        if module in _PROPERTIES_MODULES and name == "TensorProperties":
            return self.class_of(name)
        if module in _PROPERTIES_MODULES and name.removeprefix("_") == "MEM_FORMAT_ENCODING":
            return _memory_format
        if module == _METADATA and name in _METADATA_CLASSES:
            return self.class_of(name)
        if name == "_StorageInfo":  # OLMo-core has a class of its own, with the same fields
            return self.class_of(name)
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if module == "torch.serialization" and name == "_get_layout":
            return _get_layout
        if module == "collections" and name == "OrderedDict":
            return collections.OrderedDict
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _memory_format_named
        if module.startswith("pathlib") and name.endswith("Path"):
            return _plain_path
        if module.startswith("megatron.core.dist_checkpointing.") and name == "MCoreMetadata":  # Megatron < 0.15
            return self.class_of("Metadata")
        if module.startswith(_PLANS) and module != _METADATA and re.fullmatch(r"_?[A-Z]\w*", name):
            return type(name, (StandIn,), {"__module__": module})
        raise refused(module, name)


def refused(module: str, name: str) -> UntrustedCheckpointError:
    return UntrustedCheckpointError(
        f".metadata asks to import {module}.{name}, which checkpoint metadata never needs: refused. If nobody tampered "
        "with the file, it is damaged",
        module=module,
        name=name,
    )


class Places:
    """Replaces `Metadata` and `StorageMeta` for readers that have an index, and so need no description of tensors and
    records."""

    planner_data: Any = None
    storage_meta: Any = None
    save_id: Any = None

    def __init__(self, *fields: Any) -> None:  # `LazyMetadata` is pickled as a call
        names = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta")
        vars(self).update(zip(names, fields, strict=False))


class _PlacesUnpickler(MetadataUnpickler):
    def class_of(self, name: str) -> Any:
        return {"Metadata": Places, "StorageMeta": Places, "TensorProperties": StandIn}.get(name, _Unused)


def unpickle(data: bytes, path: str, unpickler: type[MetadataUnpickler], kind: type) -> Any:
    """Unpickles a `.metadata` file, whose content must be a `kind`. Raises as `metadata_pickle.loads` does."""
    check(data, path)
    with gc_paused():
        try:
            metadata = unpickler(io.BytesIO(data)).load()
        except UntrustedCheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise CorruptCheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}", key=None, file=path
            ) from error
    if type(metadata) is not kind or type(getattr(metadata, "state_dict_metadata", None)) is not dict:
        raise CorruptCheckpointError(f"{path} holds no checkpoint metadata", key=None, file=path)
    return metadata


def load_places(data: bytes, path: str) -> Places:
    """Reads the bytes of a `.metadata` file, in half the time of all of it. `path` is for messages only. Raises as
    `metadata_pickle.loads` does."""
    places: Places = unpickle(data, path, _PlacesUnpickler, Places)
    return places
