"""Checks for tensor types of torch.distributed without an import of their modules.

These modules take about a second of CPU to import (DTensor alone brings sympy). An instance exists only once its module
is loaded, so a process that loads a safetensors file never pays for them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_DTENSOR = ("torch.distributed.tensor", "DTensor")
_SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
_ASYNC_COLLECTIVE = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return isinstance(value, _loaded(_DTENSOR))


def is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    return isinstance(value, _loaded(_SHARDED_TENSOR))


def is_async_collective(value: object) -> TypeIs[AsyncCollectiveTensor]:
    return isinstance(value, _loaded(_ASYNC_COLLECTIVE))


def distributed_tensor_types() -> tuple[type, ...]:
    """`DTensor` and `AsyncCollectiveTensor`, as far as their modules are loaded."""
    return _loaded(_DTENSOR) + _loaded(_ASYNC_COLLECTIVE)


def _loaded(of: tuple[str, str]) -> tuple[type, ...]:
    """The type of a module and a name; () if the module is not loaded, or another thread is importing it."""
    module, name = of
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
