"""Runs one load of a rank: it waits for saves that copy the state, reads, also for other ranks, and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from .. import settings
from .._checkpoint.checkpoint import Read
from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.quantized_tensors import Quantized, check_cast, fill
from .._checkpoint.record_reader import ReadOptions, RecordReader
from .._checkpoint.seen_files import SeenFiles
from .._engine import _C, device_streams
from .._engine.options import used_paths
from .._engine.tensor_checks import holds_any, overlapping
from .._engine.torch_copies import device_notes
from .._ranks.groups import resolve_group
from .._routes.rounds import FailedElsewhereError
from .._state.state import State
from .._state.tensor_table import narrowed
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
        self._filled: list[torch.Tensor] = []
        #: tensors of values, under the keys of `checkpoint.quantized`, which `run` fills at its end
        self.quantized: State | None = None
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
                tensors += self._fill_quantized()
                self.finish()
                device_notes()  # logs new ones
        finally:
            filled, self._filled = self._filled, []
            increment_version(filled)
        if self.options.direct_io is True and self.totals["uncached_bytes"] + self.totals["buffered_bytes"]:
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
        if isinstance(state, dict) and holds_any(state, DTensor):  # a DTensor has a version counter of its own
            self._filled += [value for value in state.values() if isinstance(value, DTensor)]
        increment_version(self._filled)

    def check_cast(self, key: str, stored: torch.dtype, wanted: torch.dtype) -> None:
        """Raises `CheckpointError` if a cast of a stored tensor would leave out its scales."""
        if stored != wanted:
            name, why = self.checkpoint.aliases.get(key, key), self.checkpoint.not_dequantized
            if name != key:
                why = f"{key} is another name of it, and values are made for the stored name only"
            check_cast(name, stored, wanted, self._keys, why)

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(self.checkpoint.keys())

    def _fill_quantized(self) -> int:
        """Fills the tensors of `quantized` with values, and returns their number. Each rank reads for itself."""
        if self.quantized is None:
            return 0
        self.begin(self.quantized, None)
        description = self.quantized
        shared = self.options.direct_io == "auto" and ranks_of_node() > 1

        def boxes() -> Iterator[tuple[Quantized, Sequence[int], torch.Tensor]]:
            for row, (name, *_, offset, size) in enumerate(description.items):
                tensor, inside = description.source(row)
                yield self.checkpoint.quantized[name], offset, narrowed(tensor.detach(), inside, size)

        def read(reads: list[Read]) -> None:
            parts = self.checkpoint.parts(reads)
            self.fill(
                (self.target(self.record(of.key, of.chunk, of.dtype), of.inside, of.target) for of in parts),
                through_cache=shared,
            )

        fill(boxes(), read, self.threads)
        return len(set(description.names))


def ranks_of_node() -> int:
    """Returns how many ranks load on this node."""
    group = resolve_group(None)
    return ranks_of_this_node(1 if group is None else dist.get_world_size(group))


def overlaps_itself(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: several elements of the tensor to load into are the same memory (it is expanded, or overlaps itself): "
        "load into a clone of it",
        key=key,
    )
