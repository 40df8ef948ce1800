"""Makes states of random bits for benchmarks, and compares what was loaded with them bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

State = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]

ITEM_BYTES = 2  # every state is bfloat16
_POISON = 0x5A


def bytes_in(shapes: Shapes) -> int:
    """Bytes of all tensors with these shapes."""
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES


def build(shapes: Shapes, device: str = "cpu") -> State:
    """Tensors with these shapes, each in memory of its own, filled with random bits in place."""
    generator = torch.Generator(device).manual_seed(0)
    state = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    for tensor in state.values():
        _bits(tensor).random_(generator=generator)
    return state


def targets_for(state: State) -> State:
    """Tensors like those of `state` to load into, with every page touched."""
    targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    poison(targets)
    return targets


def poison(state: State) -> None:
    """Overwrites all contents, so that nothing that an earlier load left can pass for a result."""
    for tensor in state.values():
        _bits(tensor).fill_(_POISON)


def stamp(state: State, number: int) -> None:
    """Changes each tensor a little, as training would, so that an older save cannot pass for this one."""
    for tensor in state.values():
        _bits(tensor)[0] = number % 251


def differences(state: State, loaded: State) -> list[str]:
    """Names of the tensors that are not equal bit for bit (NaNs compare by their bits)."""
    return [name for name, tensor in state.items() if not torch.equal(_bits(tensor), _bits(loaded[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as integers, of 8 bytes where its size allows it."""
    flat = tensor.view(-1)
    return flat.view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)
