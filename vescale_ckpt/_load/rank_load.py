"""Runs one load of a rank: it waits for saves that copy the state, reads, also for other ranks, and counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from .. import settings
from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.record_reader import ReadOptions, RecordReader
from .._checkpoint.seen_files import SeenFiles
from .._checkpoint.view import View
from .._engine import _C, device_streams
from .._engine.options import used_paths
from .._engine.tensor_checks import holds_any, overlapping
from .._engine.torch_copies import device_notes
from .._engine.torch_types import dtensor_type
from .._ranks.groups import resolve_group
from .._routes.routed_read import FailedElsewhereError
from .._state.state import State
from .._write.optimizer_gate import wait_until_copied
from ..errors import CheckpointError
from ..reports import LoadStats
from ..settings import ranks_of_this_node


class RankLoad(RecordReader):
    """One load of this rank: the tensors that it fills, and its statistics. Only `read_tensors` may be called on any
    thread, but on one at a time."""

    def __init__(self, checkpoint: LoadableCheckpoint, options: ReadOptions, seen: SeenFiles) -> None:
        super().__init__(checkpoint, options, seen)
        self.checkpoint = checkpoint
        self.view = View(checkpoint)
        self._filled: list[torch.Tensor] = []
        self.shared_bytes = 0  #: those of `bytes` that several ranks needed and one of them read

    def run(self, work: Callable[[], tuple[int, int]]) -> LoadStats:
        """Runs `work`, which does all of a load and returns how many tensors and objects it read.

        If it raises `FailedElsewhereError`, this returns without an error, with an incomplete load: the rank that
        failed raises. Raises `CheckpointError` if a file changed after `file`, or direct I/O was required but not
        possible.
        """
        started = time.perf_counter()
        tensors = objects = 0
        self.streams = device_streams.current_streams()
        try:
            with suppress(FailedElsewhereError):
                tensors, objects = work()
                self.finish()
                device_notes()  # logs new ones
        finally:
            filled, self._filled = self._filled, []
            increment_version(filled)
        if self.options.direct_io is True and self.totals["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self.where} could not be read past the page cache ({used_paths(self.totals)})"
            )
        return LoadStats(
            seconds=time.perf_counter() - started,
            tensors=tensors,
            objects=objects,
            bytes=self.bytes,
            io_path=used_paths(self.totals),
            verified=self.options.verify,
            unverified_bytes=self.unverified_bytes,
            fallback_tensors=self.fallback_tensors,
            shared_bytes=self.shared_bytes,
            **self.totals,
        )

    def begin(self, description: State | None, state: object) -> None:
        """Prepares the description's tensors and the DTensors of `state`. Called before the first byte is loaded.

        Torch's version counters of the tensors are raised now and at the load's end, so that code that compares them
        notices the change. Waits until an asynchronous save has copied the tensors.
        """
        tensors = [] if description is None else description.tensors
        if description is not None and (bad := overlapping(tensors, _C.not_contiguous(description.table))):
            items = range(len(description.names))
            raise overlaps_itself(
                next(description.names[item] for item in items if description.tensor_index(item) == bad[0])
            )
        phase = f"loading {self.where}: wait until a save has copied the state"
        wait_until_copied(phase, settings.timeout(self.options.timeout))
        self._filled += tensors
        dtensor = dtensor_type()
        if isinstance(state, dict) and holds_any(state, dtensor):  # a DTensor has a version counter of its own
            self._filled += [value for value in state.values() if isinstance(value, dtensor)]
        increment_version(self._filled)


def ranks_of_node() -> int:
    """Returns how many ranks load on this node."""
    group = resolve_group(None)
    return ranks_of_this_node(1 if group is None else dist.get_world_size(group))


def overlaps_itself(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: several elements of the tensor to load into are the same memory (it is expanded, or its dimensions "
        "overlap): load into a clone of it",
        key=key,
    )
