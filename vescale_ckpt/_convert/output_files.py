"""Writes the files of a conversion under their names, and the file of torch.save."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._checkpoint.checkpoint import Read
from .._checkpoint.view import View
from .._engine.engine_errors import named_system_errors
from .._state.flatten import nest
from .._state.structure import Structure
from .._storage.open_storage import storage_at
from .._storage.pending import PendingFile
from ..errors import CheckpointError
from .batches import Buffers
from .plan import Output, Plan

#: Calls the function that it gets with the path of a file to create.
Create = Callable[[Callable[[str], Any]], Any]
#: Writes the content of a file into a folder, and syncs it.
Write = Callable[[str, Create, View, Buffers], None]


@dataclass(frozen=True)
class OutputFile:
    """A file to write."""

    name: str  #: in its folder; empty if the destination is one file
    bytes: int  #: bytes of its tensors
    write: Write


@dataclass(frozen=True)
class Files:
    """All files of a conversion, and a last step in their folder after they are written."""

    files: list[OutputFile]
    finish: Callable[[str], None] | None = None  #: called with the folder; None if there is nothing more to do

    @classmethod
    def one(cls, outputs: Sequence[Output], write: Write) -> Files:
        """The destination is one file."""
        return cls([OutputFile("", sum(output.bytes for output in outputs), write)])


def write_file(file: OutputFile, path: str, view: View, buffers: Buffers) -> None:
    """Writes a file into the folder `path`: its content is durable, its directory entry is not yet. A file without a
    name appears as `path` when it is complete and durable, or not at all."""
    if file.name:
        file.write(path, lambda make: make(os.path.join(path, file.name)), view, buffers)
    else:
        with PendingFile(path) as pending:
            file.write(pending.directory, pending.create, view, buffers)
            pending.commit()


# --- Files of torch.save


def torch_file(plan: Plan, values: Mapping[str, Any]) -> Files:
    """The file that torch.save writes for a dict of the plan's tensors and of objects, nested according to its paths.
    All of them are in memory while it is written."""
    outputs, structure = [output for output in plan.outputs if output.name not in plan.ties], plan.structure
    needed = sum(output.bytes for output in outputs)

    def write(directory: str, create: Create, view: View, buffers: Buffers) -> None:
        with named_system_errors(directory, needed):
            storage_at(directory).check_space(needed)
            file = create(lambda path: _File(path, "xb"))
            file.written = buffers.written
            read = {output.name: _read_whole(output, view) for output in outputs}
            tensors = {output.name: read[plan.ties.get(output.name, output.name)] for output in plan.outputs}
            state = nest({**tensors, **values}, plan.paths, None if structure is None else Structure.unpack(structure))
            try:
                with io.BufferedWriter(file) as stream:
                    torch.save(state, stream)
            except Exception as error:
                raise CheckpointError(f"torch.save does not store this: {type(error).__name__}: {error}") from error
            finally:
                if file.error is not None:
                    raise file.error
            storage_at(directory).sync(os.path.basename(file.name))

    return Files.one(outputs, write)


class _File(io.FileIO):
    """Reports progress. Keeps the first error and drops later writes, because torch would hide that error behind
    errors of its own."""

    written: Callable[[int], None] | None = None
    error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                count = super().write(data)
                if self.written is not None:
                    self.written(count)
                return count
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


def _read_whole(output: Output, view: View) -> torch.Tensor:
    """Reads all of an output into memory of its own."""
    stored = torch.empty(output.shape, dtype=output.stored_dtype, device="cpu")
    view.read([Read(output.name, (0,) * len(output.shape), stored)])
    return stored.to(output.dtype)
