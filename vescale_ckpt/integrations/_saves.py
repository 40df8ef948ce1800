"""`Saves` keeps a host's old checkpoints until the asynchronous save that replaces them is durable.

Hosts save a new checkpoint and then remove an old one, in two calls. An asynchronous save has only begun between them.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import torch.distributed as dist

from .. import SaveHandle, settings
from .._storage.open_storage import checkpoint_path, is_folder
from ..api import save
from ..manager.step_directories import remove_unused
from ..settings import checked_flag

logger = logging.getLogger(__name__)


class Saves:
    """The saves of one host on this rank, of which one may be running.

    While it is, removals wait for its success. If it fails, nothing is removed.
    """

    def __init__(self, async_checkpoint: bool, fingerprint: bool = False) -> None:
        self.async_checkpoint = checked_flag("async_checkpoint", async_checkpoint)
        self._fingerprint = checked_flag("fingerprint", fingerprint)
        self._running: SaveHandle | None = None  # its error has not been raised
        self._in_use: list[str] = []  # folders to remove, which another process was reading
        self._waits_at_exit = False

    def save(
        self,
        path: str,
        state: Mapping[str, Any],
        extra_files: Mapping[str, bytes] | None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Saves, as `vescale_ckpt.save` does. Raises the error of the save before, on all ranks.

        `extra_files`: None on all ranks but one. That one also makes room where the host has a file of that path.
        """
        self._settle()
        self._running = None  # `save` raises its error, if it has one
        replaced = None
        if extra_files is not None and os.path.isfile(path):
            replaced = f"{path}.replaced"
            os.replace(path, replaced)
        self._running = save(
            path,
            state,
            async_checkpoint=self.async_checkpoint,
            process_group=process_group,
            extra_files=extra_files,
            fingerprint=self._fingerprint,
        )
        if replaced is not None:
            self.remove(replaced, os.unlink)
        if self.async_checkpoint and not self._waits_at_exit:
            # Hosts destroy the process group at exit. They have registered that before: this runs first.
            atexit.register(self._wait_at_exit)
            self._waits_at_exit = True

    def remove(self, path: str, remove_file: Callable[[str], object]) -> None:
        """Removes a checkpoint, once the last save is durable. `remove_file` is called if it is a file."""
        if self._running is None or self._running.stats is not None:
            self._remove(path, remove_file)
        else:
            self._running.add_done_callback(lambda handle: self._remove_after(handle, path, remove_file))

    def wait(self) -> None:
        """Waits until the last save is durable, and what it replaces is removed. Raises its error, once."""
        self._settle()
        running, self._running = self._running, None
        if running is not None:
            running.future.result()

    def _settle(self) -> None:
        if self._running is not None:
            futures.wait([self._running.future])

    def _wait_at_exit(self) -> None:
        """Raises nothing: the package sets the exit status for an error that nobody has seen."""
        if self._running is not None:
            futures.wait([self._running.future], timeout=float(settings.lenient("exit_timeout")))

    def _remove_after(self, handle: SaveHandle, path: str, remove_file: Callable[[str], object]) -> None:
        if handle.wait() is not None:
            logger.warning("%s stays, because the save of the checkpoint after it has failed", path)
            return
        try:
            self._remove(path, remove_file)
        except Exception:
            logger.exception("%s cannot be removed", path)

    def _remove(self, path: str, remove_file: Callable[[str], object]) -> None:
        if os.path.islink(path):
            os.unlink(path)
        elif os.path.isfile(path):
            remove_file(path)
        else:
            self._in_use.append(checkpoint_path(path))
        folders, self._in_use = self._in_use, []
        for folder in folders:
            if is_folder(folder) and not remove_unused(folder):
                logger.info("%s is in use: it is removed after a later save", folder)
                self._in_use.append(folder)
