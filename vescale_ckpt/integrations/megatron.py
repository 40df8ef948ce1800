"""`SaveStrategy` writes the sharded part of a Megatron checkpoint, for `megatron.core.dist_checkpointing.save`."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from .. import StorageWriter
from ..errors import CheckpointError
from ._versions import check_version, hook

__all__ = ["SaveStrategy"]

check_version("megatron-core", ("0.16", "0.17"))

_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
_TorchStrategy: Any = hook(_MODULE, "TorchDistSaveShardedStrategy")
_Planner: Any = hook(_MODULE, "MCoreSavePlanner")
_flattened: Any = hook(_MODULE, "_replace_state_dict_keys_with_sharded_keys")
_for_dcp: Any = hook(_MODULE, "mcore_to_pyt_state_dict")


class SaveStrategy(_TorchStrategy):
    """Megatron's strategy "torch_dist" with the storage of this package: `save(..., sharded_strategy=SaveStrategy())`.

    Keys, planner and folder are Megatron's, so Megatron loads the checkpoint without any strategy of ours. Saves are
    synchronous.

    Options are those of Megatron's `TorchDistSaveShardedStrategy`; its `thread_count` has no effect.
    """

    def __init__(self, backend: str = "torch_dist", version: int = 1, **options: Any) -> None:
        super().__init__(backend, version, **options)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        state, _, _ = _flattened(sharded_state_dict, self.keep_only_main_replica)
        save(
            _for_dcp(state, False),
            storage_writer=StorageWriter(checkpoint_dir),
            planner=_Planner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
        )

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Any:
        raise CheckpointError("SaveStrategy saves synchronously: save without async_sharded_save (--async-save)")
