"""Checks for types of torch.distributed without an import of their modules.

These modules take about a second of CPU to import (DTensor alone brings sympy). An instance exists only once its module
is loaded, so a process that saves and loads plain tensors never pays for them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import Protocol, runtime_checkable  # as in DCP: before Python 3.12, typing calls `__getattr__`

if TYPE_CHECKING:
    import torch
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.tensor import DTensor
    from torch.nn import Module
    from typing_extensions import TypeIs

_DTENSOR = ("torch.distributed.tensor", "DTensor")
_FSDP1 = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_TENSOR_METADATA = ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")
_SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
_ASYNC_COLLECTIVE = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")


@runtime_checkable
class Stateful(Protocol):
    """What DCP's `Stateful` is: an object that has both methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return isinstance(value, _loaded(_DTENSOR))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, and any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    return isinstance(value, _loaded(_SHARDED_TENSOR))


def is_async_collective(value: object) -> TypeIs[AsyncCollectiveTensor]:
    return isinstance(value, _loaded(_ASYNC_COLLECTIVE))


def is_tensor_metadata(value: object) -> TypeIs[TensorStorageMetadata]:
    """Whether an entry of DCP's metadata is of a tensor, not of an object."""
    return isinstance(value, _loaded(_TENSOR_METADATA))


def has_fsdp1(module: Module) -> bool:
    """Whether FSDP1 wraps a part of the module."""
    return any(kind.fsdp_modules(module) for kind in _loaded(_FSDP1))


def dtensor_type() -> tuple[type[DTensor], ...]:
    """`DTensor`, if its module is loaded, for checks of types."""
    return _loaded(_DTENSOR)


def sharded_tensor_type() -> tuple[type[ShardedTensor], ...]:
    """`ShardedTensor`, if its module is loaded, for checks of types."""
    return _loaded(_SHARDED_TENSOR)


def distributed_tensor_types() -> tuple[type, ...]:
    """`DTensor` and `AsyncCollectiveTensor`, as far as their modules are loaded."""
    return _loaded(_DTENSOR) + _loaded(_ASYNC_COLLECTIVE)


def _loaded(of: tuple[str, str]) -> tuple[Any, ...]:
    """The type of a module and a name; () if the module is not loaded, or another thread is importing it."""
    module, name = of
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
