"""Model states to save: their names, shapes and contents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

GIB = 2**30
ITEM_BYTES = 2  # every state is bfloat16
LAYERS = 18  # with nine tensors a layer, an embedding and a norm: 164 tensors
POISON = 0x5A


@dataclass(frozen=True)
class Kind:
    """A family of states: what it looks like, and how large it is unless told otherwise."""

    summary: str
    default_gib: float
    shapes: Callable[[float], Shapes]


def _widths(elements: float, vocabulary: int) -> tuple[int, int, int]:
    """Hidden, key/value and feed-forward width of a Llama of about so many elements.

    With grouped keys (a quarter) and a feed-forward of 3.5 times the width, a layer holds 13 widths squared.
    """
    per_square = 13 * LAYERS
    root = math.sqrt(vocabulary**2 + 4 * per_square * elements)
    width = (root - vocabulary) / (2 * per_square)
    step = 64 if width >= 512 else 8
    hidden = max(step, round(width / step) * step)
    return hidden, hidden // 4, hidden * 7 // 2


def _llama(gib: float) -> Shapes:
    elements = gib * GIB / ITEM_BYTES
    vocabulary = min(32_000, max(64, int(elements / 8192)))
    hidden, keys, wide = _widths(elements, vocabulary)
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.self_attn.k_proj.weight"] = (keys, hidden)
        shapes[f"{prefix}.self_attn.v_proj.weight"] = (keys, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (wide, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def _stacked(gib: float) -> Shapes:
    hidden, keys, wide = _widths(gib * GIB / ITEM_BYTES, 0)
    return {
        "layers.q": (LAYERS, hidden, hidden),
        "layers.k": (LAYERS, keys, hidden),
        "layers.v": (LAYERS, keys, hidden),
        "layers.o": (LAYERS, hidden, hidden),
        "layers.gate": (LAYERS, wide, hidden),
        "layers.up": (LAYERS, wide, hidden),
        "layers.down": (LAYERS, hidden, wide),
    }


def _equal_tensors(shape: tuple[int, ...]) -> Callable[[float], Shapes]:
    def shapes(gib: float) -> Shapes:
        count = max(1, round(gib * GIB / (math.prod(shape) * ITEM_BYTES)))
        return {f"blocks.{index:07d}.weight": shape for index in range(count)}

    return shapes


KINDS: dict[str, Kind] = {
    "llama": Kind("Llama-like, 164 tensors", 2.0, _llama),
    "stacked": Kind("the layers stacked in 7 tensors", 2.0, _stacked),
    "one": Kind("one tensor", 1.0, lambda gib: {"weight": (max(1, round(gib * GIB / ITEM_BYTES)),)}),
    "small": Kind("tensors of 64 KiB (16,384 by default)", 1.0, _equal_tensors((128, 256))),
    "tiny": Kind("tensors of 1 KiB (10,000 by default)", 10_000 * 1024 / GIB, _equal_tensors((512,))),
}


def shapes_of(kind: str, gib: float | None) -> Shapes:
    """Names and shapes of the state ``kind``, of about ``gib`` GiB (its own default if None)."""
    entry = KINDS[kind]
    return entry.shapes(entry.default_gib if gib is None else gib)


def bytes_in(shapes: Shapes) -> int:
    """Bytes of all tensors with these shapes."""
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES


def build(shapes: Shapes, seed: int, device: str = "cpu") -> State:
    """Tensors with these shapes, each in memory of its own, filled with random bits in place."""
    generator = torch.Generator(device).manual_seed(seed)
    state = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    for tensor in state.values():
        _bits(tensor).random_(generator=generator)
    return state


def targets_for(state: State) -> State:
    """Tensors like those of ``state`` to load into, with every page touched."""
    targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    poison(targets)
    return targets


def poison(state: State) -> None:
    """Overwrite all contents, so that nothing that an earlier load left can pass for a result."""
    for tensor in state.values():
        _bits(tensor).fill_(POISON)


def stamp(state: State, number: int) -> None:
    """Change each tensor a little, as training would, so that an older save cannot pass for this one."""
    for tensor in state.values():
        _bits(tensor)[0] = number


def differences(state: State, loaded: State) -> list[str]:
    """Names of the tensors that are not equal bit for bit (NaNs compare by their bits)."""
    return [name for name, tensor in state.items() if not torch.equal(_bits(tensor), _bits(loaded[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as integers, of 8 bytes where its size allows it."""
    flat = tensor.view(-1)
    return flat.view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)
