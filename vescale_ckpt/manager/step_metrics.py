"""Stores the metrics of a checkpoint for the manager, as a small JSON file in its directory.

The file is written before the save commits, so that a committed checkpoint has its metrics. It holds the fingerprint of
the `.metadata` that the save replaces, and is ignored while that `.metadata` is there. So a dead save leaves the
checkpoint before it without metrics, not with wrong ones.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from .._checkpoint.native.file_names import METRICS_NAME
from .._checkpoint.native.metadata_file import metadata_fingerprint
from .._checkpoint.native.step_order import read_record, write_record
from .._engine import _C
from .._engine.engine_errors import of_system
from .._storage.open_storage import storage_at
from ..errors import CorruptCheckpointError

logger = logging.getLogger(__name__)


def write(directory: str, step: int, metrics: Mapping[str, Any] | None) -> None:
    """Writes the metrics of a save that is about to begin, durably. Without metrics, removes those of the save before.

    Raises `_C.EngineError` and OSError for errors of the file system.
    """
    storage = storage_at(directory)
    if not metrics:
        if storage.has(METRICS_NAME):  # not everybody may remove objects
            storage.remove(METRICS_NAME)
        return
    values = {name: _as_json(value) for name, value in as_numbers(metrics).items()}
    record = {"step": step, "metrics": values, "replaces": metadata_fingerprint(directory)}
    try:
        write_record(directory, METRICS_NAME, record)
    except BaseException:
        with contextlib.suppress(OSError, _C.EngineError):
            storage.remove(METRICS_NAME)  # otherwise the metrics of an earlier save would count for this save
        raise


def _as_json(value: float) -> float | str | None:
    """Returns a value that JSON can hold: None for NaN, and a text that `float` reads for an infinity."""
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as floats. Tensors and arrays of one element are converted. Raises TypeError or ValueError for a
    value that is no number."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"metrics[{name!r}]: expected a number, got {value!r:.100}") from error
    return numbers


def read(directory: str) -> dict[str, float]:
    """Returns the metrics of the checkpoint in a directory, without metrics that are missing, damaged or NaN. Raises
    `CheckpointError` if an object store cannot read them: without them the best checkpoint might be removed."""
    try:
        record = read_record(directory, METRICS_NAME)
        if record["replaces"] == metadata_fingerprint(directory):
            return {}
        return {name: float(value) for name, value in record["metrics"].items() if value is not None}
    except CorruptCheckpointError:
        logger.warning("the metrics in %s are damaged, and do not count", directory)
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if storage_at(directory).is_away(error):
            raise of_system(error, directory) from error
        return {}
