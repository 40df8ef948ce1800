"""Fast, verified, never torn checkpoints for PyTorch: a C++ engine behind torch.distributed.checkpoint."""

from .errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleStateError,
    MissingKeysError,
    StorageFullError,
    UntrustedCheckpointError,
)
from .load_planner import LoadPlanner
from .reader import StorageReader
from .save_planner import SavePlanner
from .stats import LoadStats, SaveStats
from .writer import StorageWriter

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "IncompatibleStateError",
    "LoadPlanner",
    "LoadStats",
    "MissingKeysError",
    "SavePlanner",
    "SaveStats",
    "StorageFullError",
    "StorageReader",
    "StorageWriter",
    "UntrustedCheckpointError",
]
