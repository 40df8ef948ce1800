"""Lists the files of a checkpoint that a copy takes."""

from __future__ import annotations

import os
from contextlib import closing

from .._storage.open_storage import is_file, is_folder, storage_at
from .._storage.storage import LOCK_NAME
from ..errors import CheckpointError, CorruptCheckpointError
from .native.file_names import (
    DATA_SUFFIX,
    INDEX_NAME,
    METRICS_NAME,
    is_metadata_file,
    is_temporary_file,
)
from .native.step_order import ORDER_NAME
from .open_checkpoint import open_parts
from .safetensors.model_names import INDEX_SUFFIX, SINGLE_NAME, SUFFIX, is_temporary_index, token_of


class CopiedFiles:
    """The files that a copy of the checkpoint in a folder needs. Raises as `files_of_checkpoint` does."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._versions = _metadata_files(source)  # Listed before the metadata is read, so that a later save is seen.
        self.of_checkpoint = files_of_checkpoint(source)
        names, self.left_out = names_to_copy(source, self.of_checkpoint)
        self._last = [name for name in names if completes(name)]
        #: The paths of the files that do not complete a checkpoint, by name.
        self.paths = {name: os.path.join(source, name) for name in names if not completes(name)}

    @property
    def names(self) -> set[str]:
        """The names of all files in the copy."""
        return {*self.paths, *self._last}

    def last(self) -> dict[str, bytes]:
        """The contents of the files that complete the checkpoint, by name, in the order to write them. Raises
        `CheckpointError` if a save has changed the source since it was listed."""
        storage = storage_at(self.source)
        found = {name: storage.read(name) for name in self._last}
        if _metadata_files(self.source) != self._versions:
            raise CheckpointError(f"{self.source} was saved to while it was copied", path=self.source)
        return found

    def foreign_in(self, path: str) -> list[str]:
        """The names in the folder of another checkpoint that belong to neither that checkpoint nor this copy, sorted.
        Raises `CheckpointError` if that checkpoint is damaged or missing."""
        try:
            of_checkpoint = files_of_checkpoint(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not replaced: {error}", path=path) from None
        replaced, left_out = names_to_copy(path, of_checkpoint)
        expected = {*self.names, *of_checkpoint, INDEX_NAME}
        foreign = [name for name in left_out if is_folder(os.path.join(path, name))]
        foreign += [name for name in replaced if name not in expected and not is_metadata_file(name)]
        return sorted(foreign)


def completes(name: str) -> bool:
    """Whether a file of that name completes a checkpoint, so that a copy writes it last."""
    return is_metadata_file(name) or name.endswith(INDEX_SUFFIX)


def marks_checkpoint(name: str) -> bool:
    """Whether a folder with a file of that name holds a checkpoint, and not what a copy that died has left."""
    return completes(name) or name == SINGLE_NAME


def tells_its_save(name: str) -> bool:
    """Whether the content of a file beside a checkpoint tells to which save it belongs."""
    return name in (METRICS_NAME, ORDER_NAME)


def holds_data(name: str) -> bool:
    """Whether a file of that name holds tensors and objects."""
    return name.endswith((DATA_SUFFIX, SUFFIX))


def files_of_checkpoint(path: str) -> set[str]:
    """The files with the tensors and objects of the checkpoint in a folder. Raises `CheckpointError` if the checkpoint
    is damaged or missing."""
    named: set[str] = set()
    for part in open_parts(path):
        with closing(part):
            for fault in part.faults():
                raise fault
            named |= set(map(os.path.normpath, part.file_names()))
    return named


def _metadata_files(path: str) -> dict[str, tuple[int, ...]]:
    """The metadata and index files of a folder, with the identity of their versions."""
    storage = storage_at(path)
    found = [name for name in storage.names() if is_metadata_file(name) or name.endswith(INDEX_SUFFIX)]
    return {name: storage.stat(name).identity for name in found}


def names_to_copy(path: str, of_checkpoint: set[str]) -> tuple[list[str], list[str]]:
    """The names of the files to copy, and the names that a copy leaves out."""
    other, left_out = set(), []
    for name in storage_at(path).names():
        if name == LOCK_NAME or name in of_checkpoint:
            continue
        is_temporary = is_temporary_file(name) or is_temporary_index(name) or token_of(name) is not None
        is_foreign = holds_data(name)  # The file belongs to another save or model.
        if is_temporary or is_foreign or not is_file(os.path.join(path, name)):
            left_out.append(name)
        else:
            other.add(name)
    for name in sorted(of_checkpoint):
        file = os.path.join(path, name)
        if not is_file(file):
            raise CorruptCheckpointError(f"data file {file} is missing or is not a file", key=None, file=file)
    return sorted(of_checkpoint | other), sorted(left_out)
