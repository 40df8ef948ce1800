"""Fast, verified, never torn checkpoints for PyTorch: a C++ engine behind torch.distributed.checkpoint."""

from . import safetensors
from .api import load, prepare, save
from .convert.run import ConvertReport, convert
from .errors import (
    CheckpointError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    IncompatibleStateError,
    LoadFailedError,
    Mismatch,
    MissingKeysError,
    RankFailedError,
    SaveFailedError,
    SaveInProgressError,
    StorageFullError,
    UntrustedCheckpointError,
)
from .gate import Gate
from .load_planner import LoadPlanner
from .manager import CheckpointManager
from .per_rank import PerRank
from .reader import StorageReader
from .save_handle import SaveHandle
from .save_planner import SavePlanner
from .stager import Stager
from .stats import LoadReport, LoadStats, SaveStats, VerifyReport
from .verify import verify
from .writer import StorageWriter

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointTimeoutError",
    "ConvertReport",
    "CorruptCheckpointError",
    "Gate",
    "IncompatibleStateError",
    "LoadFailedError",
    "LoadPlanner",
    "LoadReport",
    "LoadStats",
    "Mismatch",
    "MissingKeysError",
    "PerRank",
    "RankFailedError",
    "SaveFailedError",
    "SaveHandle",
    "SaveInProgressError",
    "SavePlanner",
    "SaveStats",
    "Stager",
    "StorageFullError",
    "StorageReader",
    "StorageWriter",
    "UntrustedCheckpointError",
    "VerifyReport",
    "convert",
    "load",
    "prepare",
    "safetensors",
    "save",
    "verify",
]
