"""Fast, verified, never torn checkpoints for PyTorch: a C++ engine behind torch.distributed.checkpoint."""

from . import errors as errors
from . import integrations as integrations
from . import metrics as metrics
from . import reports as reports
from . import safetensors as safetensors
from ._checkpoint.verify import verify as verify
from ._collective.handle import SaveHandle as SaveHandle
from ._convert.convert import ConvertReport as ConvertReport
from ._convert.convert import convert as convert
from ._convert.copy import copy as copy
from ._convert.transfer import CopyReport as CopyReport
from ._dcp.load_planner import LoadPlanner as LoadPlanner
from ._dcp.save_planner import SavePlanner as SavePlanner
from ._dcp.stager import Stager as Stager
from ._dcp.storage_reader import StorageReader as StorageReader
from ._dcp.storage_writer import StorageWriter as StorageWriter
from ._fingerprint.collect import fingerprint as fingerprint
from ._fingerprint.fingerprint import Fingerprint as Fingerprint
from ._fingerprint.prove import Proof as Proof
from ._fingerprint.prove import prove as prove
from ._inspect.info import inspect as inspect
from ._state.per_rank import PerRank as PerRank
from ._state.random_state import RandomState as RandomState
from ._storage.object_clients import register_store as register_store
from ._write.optimizer_gate import Gate as Gate
from ._write.safetensors_layout import Safetensors as Safetensors
from .api import load as load
from .api import prepare as prepare
from .api import save as save
from .errors import *  # noqa: F403 (its `__all__`, as in __init__.py)
from .manager.manager import CheckpointManager as CheckpointManager
from .manager.retention import Retention as Retention
from .manager.schedule import Schedule as Schedule
from .manager.tier import Tier as Tier
from .reports import CheckpointInfo as CheckpointInfo
from .reports import JobStats as JobStats
from .reports import LoadReport as LoadReport
from .reports import LoadStats as LoadStats
from .reports import SaveStats as SaveStats
from .reports import VerifyReport as VerifyReport

__version__: str
__all__: list[str]
