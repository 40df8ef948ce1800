"""What commands print, as values: the functions behind `vescale-ckpt copy`, `diff` and `stats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vescale_ckpt._convert.copy import copy
from vescale_ckpt._inspect.diff import diff
from vescale_ckpt._inspect.stats import stats

__all__ = ["copy", "difference", "tensor_stats"]


def difference(a: Path, b: Path) -> Any:
    """Keys, kinds and values that differ."""
    return diff(a, b, with_values=True)


def tensor_stats(path: Path, keys: str | None = None) -> list[Any]:
    return stats(path, keys)
