"""Finds the data files that the metadata of a directory names, for clean-ups and saves."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..._state import extra_files
from ..._storage.open_storage import storage_at
from ...errors import CheckpointError
from . import file_names
from .metadata_file import has_metadata, metadata_fingerprint

if TYPE_CHECKING:
    from .native_checkpoint import NativeCheckpoint


@dataclass(frozen=True)
class Replaced:
    """What a save needs to know of the checkpoint that it replaces."""

    fingerprint: str = ""  #: of its metadata; empty if there is none
    files: frozenset[str] = frozenset()  #: data files that it names
    checkpoint: NativeCheckpoint | None = None

    @classmethod
    def read(cls, directory: str) -> Replaced:
        """Reads it from the metadata of the directory. Nothing is known if that is missing or cannot be read."""
        if not has_metadata(directory, None):
            return cls()
        try:
            found, checkpoint = metadata_fingerprint(directory), _opened(directory, None)
            return cls(found, frozenset(checkpoint.named_files()), checkpoint)
        except (CheckpointError, OSError):
            return cls()

    def extra_names(self, directory: str) -> list[str]:
        """Returns the names of the extra files of the checkpoint that is there now. Reads it if it is another one."""
        is_same = False
        with contextlib.suppress(OSError):
            is_same = metadata_fingerprint(directory) == self.fingerprint
        present = self if is_same else self.read(directory)
        try:
            return [] if present.checkpoint is None else extra_files.names_in(present.checkpoint.keys())
        except CheckpointError:
            return []  # loads cannot read it, either


def _opened(directory: str, rank: int | None) -> NativeCheckpoint:
    from .native_checkpoint import NativeCheckpoint  # it imports torch

    return NativeCheckpoint.by_index(directory, rank)


def named_by_any(directory: str) -> set[str]:
    """Data files that the metadata files of the directory name now. Raises `CheckpointError` if one cannot be read."""
    named: set[str] = set()
    for name in filter(file_names.is_metadata_file, storage_at(directory).names()):
        named |= _opened(directory, file_names.rank_of_metadata(name)).named_files()
    return named
