"""`Source` opens one checkpoint for one load of this rank, keeps it from clean-ups meanwhile, and reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.native.file_names import is_data_file, metadata_name
from .._checkpoint.open_checkpoint import fingerprint, open_to_load, unpack_from_rank
from .._checkpoint.record_reader import ReadOptions
from .._checkpoint.safetensors.headers import ExportedMeanwhileError
from .._checkpoint.safetensors.safetensors_checkpoint import was_exported_since
from .._checkpoint.seen_files import SeenFiles
from .._checkpoint.stacking import Stack
from .._engine.gc import gc_paused
from .._engine.options import direct_io_setting
from .._observe import timeline
from .._storage.open_storage import checkpoint_path, storage_at
from .._storage.storage import Lease
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import LoadStats
from .rank_load import RankLoad


class Source:
    """A checkpoint to load. Opening it locks `.metadata`, which `read` or another opening releases; safetensors folders
    have no such file and no lock. A pickle leaves the lock out.

    Args:
        given_path: equal on all ranks, even if a relative path means different directories.
        stack: that of `vescale_ckpt.load`, checked.
    """

    def __init__(self, given_path: str, options: ReadOptions, stack: Stack | None = None) -> None:
        self.path = checkpoint_path(given_path)
        self.given_path = given_path
        self.options = replace(options, direct_io=direct_io_setting(options.direct_io))
        self.stack = stack
        self._seen = SeenFiles("", is_data_file)  # identities of the files of this load, to detect a replaced file
        self._lock = Lease()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": Lease()}

    def fingerprint(self) -> str:
        """A short text that differs between the checkpoints of two saves; empty if there is none. Raises OSError."""
        self._look_anew(None)
        return fingerprint(self.path)

    def open(self, rank: int | None = None) -> LoadableCheckpoint:
        """Opens the checkpoint; with `rank`, what that rank saved without collectives. Raises as `open_to_load`."""
        self._look_anew(rank)
        self._share_lock(rank)
        return self._stacked(open_to_load(self.path, rank, self.options.verify))

    def unpack(self, message: bytes) -> LoadableCheckpoint:
        """The checkpoint from a message of `pack_for_ranks`. `fingerprint` must be equal on both ranks. Raises as
        `open`."""
        self._share_lock(None)
        return self._stacked(unpack_from_rank(self.path, message))

    def release(self) -> None:
        self._lock.release()

    def _look_anew(self, rank: int | None) -> None:
        self._seen = SeenFiles(os.path.join(self.path, metadata_name(rank)), is_data_file)

    def _share_lock(self, rank: int | None) -> None:
        self._lock.release()
        self._lock = storage_at(self.path).share(metadata_name(rank))

    def _stacked(self, found: LoadableCheckpoint) -> LoadableCheckpoint:
        return found if self.stack is None else found.stacked(self.stack)

    def read(self, checkpoint: LoadableCheckpoint, work: Callable[[RankLoad], LoadStats]) -> LoadStats:
        """Calls `work` with a load of the checkpoint that this has opened, and releases the lock. Raises
        `ExportedMeanwhileError` if it failed because exports replaced what was planned on."""
        try:
            with gc_paused(), timeline.phase("read"):
                return work(RankLoad(checkpoint, self.options, self._seen))
        except CheckpointError as error:
            if checkpoint.format == "safetensors" and was_exported_since(self.path, checkpoint.save_id):
                raise ExportedMeanwhileError(
                    f"{error}. {self.path} is not what it was when the load began: load it again when exports into it "
                    "are done",
                    path=self.path,
                ) from error
            if isinstance(error, CorruptCheckpointError):
                stored = checkpoint.stored_key(error.file, error.offset)
                if stored not in (None, error.key):
                    text = f"{error.message} (stored as {stored})"
                    raise CorruptCheckpointError(text, key=error.key, file=error.file, offset=error.offset) from error
            raise
        finally:
            self.release()
