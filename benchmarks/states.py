"""Model states to save: their names and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.by_turns import GiB
from benchmarks.harness.random_states import ITEM_BYTES, Shapes
from benchmarks.planning.models import Transformer

LAYERS = 18  # with nine tensors a layer, an embedding and a norm: 164 tensors


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
    elements = gib * GiB / ITEM_BYTES
    vocabulary = min(32_000, max(64, int(elements / 8192)))
    return dict(Transformer(LAYERS, *_widths(elements, vocabulary), vocabulary, tied=True).shapes())


def _stacked(gib: float) -> Shapes:
    hidden, keys, wide = _widths(gib * GiB / ITEM_BYTES, 0)
    return {
        "layers.q": (LAYERS, hidden, hidden),
        "layers.k": (LAYERS, keys, hidden),
        "layers.v": (LAYERS, keys, hidden),
        "layers.o": (LAYERS, hidden, hidden),
        "layers.gate": (LAYERS, wide, hidden),
        "layers.up": (LAYERS, wide, hidden),
        "layers.down": (LAYERS, hidden, wide),
    }


def _small(gib: float) -> Shapes:
    shape = (128, 256)
    count = max(1, round(gib * GiB / (math.prod(shape) * ITEM_BYTES)))
    return {f"blocks.{index:07d}.weight": shape for index in range(count)}


KINDS: dict[str, Kind] = {
    "llama": Kind("Llama-like, 164 tensors", 2.0, _llama),
    "stacked": Kind("the layers stacked in 7 tensors", 2.0, _stacked),
    "one": Kind("one tensor", 1.0, lambda gib: {"weight": (max(1, round(gib * GiB / ITEM_BYTES)),)}),
    "small": Kind("tensors of 64 KiB (16,384 by default)", 1.0, _small),
}


def shapes_of(kind: str, gib: float | None) -> Shapes:
    """Names and shapes of the state ``kind``, of about ``gib`` GiB (its own default if None)."""
    entry = KINDS[kind]
    return entry.shapes(entry.default_gib if gib is None else gib)
