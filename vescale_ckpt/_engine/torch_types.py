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


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return isinstance(value, _loaded("torch.distributed.tensor", "DTensor"))


def is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    return isinstance(value, _loaded("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"))


def is_async_collective(value: object) -> TypeIs[AsyncCollectiveTensor]:
    return isinstance(value, _loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor"))


def distributed_tensor_types() -> tuple[type, ...]:
    """The subclasses of `torch.Tensor` above whose modules are loaded."""
    return _loaded("torch.distributed.tensor", "DTensor") + _loaded(
        "torch.distributed._functional_collectives", "AsyncCollectiveTensor"
    )


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """The type; () if its module is not loaded, or another thread is importing it."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
