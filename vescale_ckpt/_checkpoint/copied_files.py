"""Lists the files of a checkpoint that a copy takes, and makes the metadata of a copy of a delta save."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

from .._storage.open_storage import is_file, is_folder, storage_at
from .._storage.paths import data_path, in_sibling
from .._storage.storage import LOCK_NAME
from ..errors import CheckpointError, CorruptCheckpointError
from .native import delta_table, metadata_file, metadata_pickle
from .native.delta_table import DeltaTable
from .native.file_names import (
    DATA_SUFFIX,
    DELTA_NAME,
    INDEX_NAME,
    LEASE_MARKER,
    METADATA_NAME,
    METRICS_NAME,
    is_data_file,
    is_metadata_file,
    is_temporary_file,
)
from .native.metadata_check import TRAILER_BYTES
from .native.step_order import ORDER_NAME
from .open_checkpoint import open_parts
from .safetensors.headers import INDEX_SUFFIX, SUFFIX
from .safetensors.model_names import is_temporary_index, token_of, token_of_object


class CopiedFiles:
    """The files that a copy of the checkpoint in a folder needs. Raises as `files_of_checkpoint` does."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._versions = _metadata_files(source)  # Listed before the metadata is read, so that a later save is seen.
        of_checkpoint = files_of_checkpoint(source)
        names, self.left_out = names_to_copy(source, of_checkpoint)
        self._made = _make_self_contained(source, of_checkpoint)  # These replace files of the source.
        if self._made:
            names = [name for name in names if name not in (INDEX_NAME, DELTA_NAME)]
        self._last = [name for name in names if completes(name)]
        #: The paths of the files that do not complete a checkpoint, by their names in the copy.
        self.paths = {name_in_copy(name): data_path(source, name) for name in names if not completes(name)}
        self.of_checkpoint = set(map(name_in_copy, of_checkpoint))

    @property
    def names(self) -> set[str]:
        """The names of all files in the copy."""
        return {*self.paths, *self._last, *self._made}

    def last(self) -> dict[str, bytes]:
        """The contents of the files that complete the checkpoint, by name, in the order to write them. Raises
        `CheckpointError` if a save has changed the source since it was listed."""
        storage = storage_at(self.source)
        found = {name: storage.read(name) for name in self._last if name not in self._made} | self._made
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
        expected = {*self.names, *of_checkpoint, INDEX_NAME, DELTA_NAME}
        foreign = [name for name in left_out if is_folder(os.path.join(path, name))]
        foreign += [name for name in replaced if name not in expected and not is_metadata_file(name)]
        return sorted(foreign)


def completes(name: str) -> bool:
    """Whether a file of that name completes a checkpoint, so that a copy writes it last."""
    return is_metadata_file(name) or name.endswith(INDEX_SUFFIX)


def has_random_name(name: str) -> bool:
    """Whether a name has a random part, so that no other save gives it to a file."""
    return is_data_file(name) or token_of_object(name) is not None


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
            part.check_whole()
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
        if name == LOCK_NAME or name.startswith(LEASE_MARKER) or name in of_checkpoint:
            continue
        is_temporary = is_temporary_file(name) or is_temporary_index(name) or token_of(name) is not None
        is_foreign = holds_data(name)  # The file belongs to another save or model.
        if is_temporary or is_foreign or not is_file(os.path.join(path, name)):
            left_out.append(name)
        else:
            other.add(name)
    for name in sorted(of_checkpoint):
        file = data_path(path, name)
        if not is_file(file):
            raise CorruptCheckpointError(f"data file {file} is missing or is not a file", key=None, file=file)
    return sorted(of_checkpoint | other), sorted(left_out)


def name_in_copy(name: str) -> str:
    """The name that a data file gets in a copy. A delta save also names files of other checkpoints."""
    found = in_sibling(name)
    return name if found is None else found.file


def _make_self_contained(source: str, of_checkpoint: set[str]) -> dict[str, bytes]:
    """The metadata files of a copy that names only its own files. Empty if the source names only its own files."""
    if not any(map(in_sibling, of_checkpoint)):
        return {}
    if len(set(map(name_in_copy, of_checkpoint))) < len(of_checkpoint):
        raise CheckpointError(f"{source} names files of equal names in several folders: convert it", path=source)
    metadata = metadata_file.read_metadata(source)
    for info in {id(info): info for info in metadata.storage_data.values()}.values():
        info.relative_path = name_in_copy(info.relative_path)
    content = metadata_pickle.dumps(metadata)
    try:
        table = delta_table.read(source)
    except CheckpointError:  # Neither the source nor the copy can be the base of a delta save.
        table = DeltaTable(bytes(delta_table.SEED_BYTES), [], b"")
    delta = replace(table, files=[*map(name_in_copy, table.files)]).pack(len(content), content[-TRAILER_BYTES:])
    return {DELTA_NAME: delta, METADATA_NAME: content}
