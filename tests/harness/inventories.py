"""What a rank has to save, as its inventory says it to the planning of all ranks."""

from __future__ import annotations

from typing import Any

from vescale_ckpt._engine import _C
from vescale_ckpt._engine.rows import OBJECT
from vescale_ckpt._state.describe import Describer


def inventory_of(state: dict[str, Any]) -> bytes:
    return Describer().describe(state).inventory


def items(inventory: bytes) -> list[Any]:
    """Names, kinds, dtypes, shapes, and boxes, in the rank's order."""
    return _C.inventory_items(inventory)


def tensors(inventory: bytes) -> list[Any]:
    return [item for item in items(inventory) if item[1] != OBJECT]


def kinds(inventory: bytes) -> Any:
    return _C.inventory_kinds(inventory)
