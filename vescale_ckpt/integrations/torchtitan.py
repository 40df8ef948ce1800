"""Has torchtitan save and load its checkpoints through this package: one flag, no change of code.

    --override.imports vescale_ckpt.integrations.torchtitan.vescale

All options under `--checkpoint.` keep their meaning. `'...torchtitan.vescale={"broadcast_checkpoint": true}'` passes an
option of `vescale_ckpt.load` on.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from .. import Safetensors, SaveHandle, settings
from .._checkpoint.recognize import committed_at
from .._fingerprint.prove import prove_restored, stored_fingerprint
from .._storage.open_storage import checkpoint_path, is_file, is_folder, storage_at
from .._storage.paths import is_url
from ..api import load, save
from ..errors import CheckpointError, MissingKeysError
from ..manager.step_directories import remove_unused
from ._versions import check_version, hook

__all__ = ["VescaleCheckpointManager", "vescale"]

logger = logging.getLogger(__name__)

check_version("torchtitan", ("0.3", "0.4"))
_DCP = "torchtitan.components.checkpointer.dcp"
_Manager = hook(_DCP, "CheckpointManager")
_AsyncMode = hook(_DCP, "AsyncMode")
_collect_garbage = hook("torchtitan.tools.utils", "GarbageCollection.collect")
_derive = hook("torchtitan.config", "derive")
_override = hook("torchtitan.config", "override")
_dcp: Any = importlib.import_module(_DCP)
_filesystem = hook(_DCP, "filesystem")
for _method in ("dcp_save", "dcp_load", "_purge_stale_checkpoints", "_should_purge", "_close"):
    hook(_DCP, f"CheckpointManager.{_method}")

_STEP = re.compile(r"step-(\d+)")


def _remove(url: str) -> None:
    if not remove_unused(url):
        logger.warning("%s is in use: it stays", url)


_ON_URLS: dict[str, Callable[[str], Any]] = {
    "exists": lambda url: is_folder(url) or is_file(url),
    "isdir": is_folder,
    "isfile": is_file,
    "listdir": lambda url: storage_at(url).names(),
    "rmtree": _remove,
}
for _function in _ON_URLS:
    hook(_DCP, f"filesystem.{_function}")


class _Files:
    """torchtitan's functions for files, which ask this package's clients about URLs: fsspec caches what it has listed,
    and wants a package for each kind of store."""

    def __getattr__(self, name: str) -> Any:
        theirs, ours = getattr(_filesystem, name), _ON_URLS.get(name)
        if ours is None:
            return theirs
        return lambda path: ours(checkpoint_path(path)) if is_url(str(path)) else theirs(path)


_FILES = _Files()


class VescaleCheckpointManager(_Manager):
    """torchtitan's `CheckpointManager`, saving and loading through this package.

    It counts complete checkpoints only when it purges, and purges when an asynchronous save is durable. Loads from
    Hugging Face's safetensors are left to torchtitan, whose readers convert them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Manager.Config):
        broadcast_checkpoint: str | bool = "auto"
        """Whether ranks read for each other, as vescale_ckpt.load takes it."""
        prove: bool = False
        """Whether saves keep fingerprints and loads are compared with them, as CheckpointManager does."""

    def __init__(self, config: Any, **options: Any) -> None:
        self._broadcast_checkpoint = settings.broadcast(config.broadcast_checkpoint)
        self._proves = config.prove
        self._last_save: SaveHandle | None = None
        _dcp.filesystem = _FILES
        super().__init__(config, **options)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        options: dict[str, Any] = {"fingerprint": self._proves}
        if to_hf:
            assert self.sd_adapter is not None, "sd_adapter is required for to_hf=True"
            state_dict = self.sd_adapter.to_hf(state_dict)
            options = {"format": Safetensors(fqn_to_index_mapping=self.sd_adapter.fqn_to_index_mapping)}
        handle = save(checkpoint_id, state_dict, async_checkpoint=async_mode != _AsyncMode.DISABLED, **options)
        self._last_save = handle
        if enable_garbage_collection:
            _collect_garbage("GC collection invoked by checkpointer.")
        if async_mode == _AsyncMode.DISABLED:
            return None
        future: Any = handle.future
        return future if async_mode == _AsyncMode.ASYNC else AsyncSaveResponse(handle.staged, future)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        try:
            load(checkpoint_id, state_dict, broadcast_checkpoint=self._broadcast_checkpoint)
        except MissingKeysError as error:
            if all(key.startswith("dataloader.dp_rank_") for key in error.missing):
                raise CheckpointError(
                    f"{checkpoint_id} was saved by another number of data parallel ranks, each with its position in "
                    "the data: with --checkpoint.exclude_from_loading dataloader the data begin anew",
                    path=checkpoint_id,
                ) from error
            raise
        if "model" in self.states:  # the model's tensors are single entries of the state
            self.states["model"].load_state_dict(state_dict)
        if self._proves:
            model = self.states["model"].state_dict() if "model" in self.states else {}
            live = {key: model.get(key, value) for key, value in state_dict.items()}
            prove_restored(stored_fingerprint(checkpoint_id), checkpoint_id, live, {})

    def _purge_stale_checkpoints(self) -> None:
        if not self._should_purge():
            return
        if self._last_save is None:
            self._purge()
        else:
            self._last_save.add_done_callback(lambda handle: self._purge() if handle.wait() is None else None)

    def _purge(self) -> None:
        found = [(int(match[1]), name) for name in _FILES.listdir(self.folder) if (match := _STEP.fullmatch(name))]
        paths = [_filesystem.join(self.folder, name) for _, name in sorted(found)]
        whole = [path for path in paths if committed_at(path) is not None]
        for path in whole[: -self.keep_latest_k]:
            self.purge_queue.put(path)

    def _close(self) -> None:
        if self._last_save is not None:  # its callback may purge; its error is reported at exit if nobody has seen it
            futures.wait([self._last_save.future])
        super()._close()


@_override(target=_Manager.Config, description="vescale_ckpt saves and loads", exact=True)
def vescale(config: Any, broadcast_checkpoint: str | bool = "auto", prove: bool = False) -> Any:
    """The override that torchtitan imports by its name."""
    return _derive(config, VescaleCheckpointManager.Config, broadcast_checkpoint=broadcast_checkpoint, prove=prove)
