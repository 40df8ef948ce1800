"""The metrics of a checkpoint: a small JSON in its directory. The checkpoint does not depend on it.

It is written before the save that it belongs to commits, so that a checkpoint is never there without its metrics; and
it names the `.metadata` that the save replaces, so that it does not count as long as that one is there: a save that
died leaves the checkpoint before it without metrics, never with wrong ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from . import _C, layout

FILE_NAME = "metrics.json"


def write(directory: str, step: int, metrics: Mapping[str, Any] | None) -> None:
    """Writes the metrics of the save that begins, durably; without any, removes those of the save before it.

    Raises `_C.EngineError` and OSError for what the disk refuses.
    """
    path = os.path.join(directory, FILE_NAME)
    if not metrics:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    values = {name: value if math.isfinite(value) else None for name, value in as_numbers(metrics).items()}
    record = {"step": step, "metrics": values, "replaces": layout.metadata_mark(directory)}
    try:
        _C.commit_file(directory, FILE_NAME, json.dumps(record, indent=1).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)  # those of an earlier save would be taken for this one's
        raise


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Raises TypeError or ValueError for what is no number; tensors and arrays of one element are."""
    return {str(name): float(value) for name, value in metrics.items()}


def read(directory: str) -> dict[str, float]:
    """The metrics of the checkpoint in a directory; none where they are missing, damaged or not finite."""
    try:
        with open(os.path.join(directory, FILE_NAME), "rb") as file:
            record = json.loads(file.read())
        if record["replaces"] == layout.metadata_mark(directory):
            return {}
        return {name: float(value) for name, value in record["metrics"].items() if value is not None}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
