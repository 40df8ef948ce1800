"""Fast, verified, never torn checkpoints for PyTorch: a C++ engine behind torch.distributed.checkpoint."""

from . import safetensors
from ._collective.handle import SaveHandle
from ._dcp.load_planner import LoadPlanner
from ._dcp.save_planner import SavePlanner
from ._dcp.stager import Stager
from ._dcp.storage_reader import StorageReader
from ._dcp.storage_writer import StorageWriter
from ._read.verify import verify
from ._state.per_rank import PerRank
from ._write.optimizer_gate import Gate
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
from .manager.manager import CheckpointManager
from .reports import LoadReport, LoadStats, SaveStats, VerifyReport

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
