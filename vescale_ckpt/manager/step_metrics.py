"""The metrics of a checkpoint: a small JSON in its directory. The checkpoint does not depend on it.

It is written before the save that it belongs to commits, so that a checkpoint is never there without its metrics; and
it names the `.metadata` that the save replaces, so that it does not count as long as that one is there: a save that
died leaves the checkpoint before it without metrics, never with wrong ones.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from .._engine import _C
from .._native.metadata_file import metadata_mark
from .._storage.directory import directory_at

FILE_NAME = "metrics.json"


def write(directory: str, step: int, metrics: Mapping[str, Any] | None) -> None:
    """Writes the metrics of the save that begins, durably; without any, removes those of the save before it.

    Raises `_C.EngineError` and OSError for what the disk refuses.
    """
    storage = directory_at(directory)
    if not metrics:
        storage.remove(FILE_NAME)
        return
    values = {name: value if math.isfinite(value) else None for name, value in as_numbers(metrics).items()}
    record = {"step": step, "metrics": values, "replaces": metadata_mark(directory)}
    try:
        storage.write(FILE_NAME, json.dumps(record, indent=1).encode())
    except BaseException:
        with contextlib.suppress(OSError, _C.EngineError):
            storage.remove(FILE_NAME)  # those of an earlier save would be taken for this one's
        raise


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Raises TypeError or ValueError for what is no number; tensors and arrays of one element are."""
    return {str(name): float(value) for name, value in metrics.items()}


def read(directory: str) -> dict[str, float]:
    """The metrics of the checkpoint in a directory; none where they are missing, damaged or not finite."""
    try:
        record = json.loads(directory_at(directory).read(FILE_NAME))
        if record["replaces"] == metadata_mark(directory):
            return {}
        return {name: float(value) for name, value in record["metrics"].items() if value is not None}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
