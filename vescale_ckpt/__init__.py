"""Fast, verified, never torn checkpoints for PyTorch: a C++ engine behind torch.distributed.checkpoint."""

from .api import SaveHandle, save
from .errors import (
    CheckpointError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    IncompatibleStateError,
    MissingKeysError,
    RankFailedError,
    SaveFailedError,
    StorageFullError,
    UntrustedCheckpointError,
)
from .load_planner import LoadPlanner
from .per_rank import PerRank
from .reader import StorageReader
from .save_planner import SavePlanner
from .stats import LoadStats, SaveStats
from .writer import StorageWriter

__all__ = [
    "CheckpointError",
    "CheckpointTimeoutError",
    "CorruptCheckpointError",
    "IncompatibleStateError",
    "LoadPlanner",
    "LoadStats",
    "MissingKeysError",
    "PerRank",
    "RankFailedError",
    "SaveFailedError",
    "SaveHandle",
    "SavePlanner",
    "SaveStats",
    "StorageFullError",
    "StorageReader",
    "StorageWriter",
    "UntrustedCheckpointError",
    "save",
]
