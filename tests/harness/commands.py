"""What commands print, as values: the functions behind `vescale-ckpt copy` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vescale_ckpt._convert.copy import copy
from vescale_ckpt._inspect.diff import diff

__all__ = ["copy", "difference"]


def difference(a: Path, b: Path) -> Any:
    """Keys, kinds and values that differ."""
    return diff(a, b, with_values=True)
