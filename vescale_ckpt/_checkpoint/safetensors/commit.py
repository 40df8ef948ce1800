"""Commits complete safetensors files as the model of a folder for exports: readers find the old model or the new one.

This holds at every instant and after a power cut, for readers that prefer the single file to the index, as loads of
this package and transformers do. One change of one name commits. The change is durable before a file of the old model
is removed:

- A single file is renamed over the old one. From then on readers ignore an index beside it.
- Several files get names that no file in the folder has, so that the old index still names its own files. Then the new
  index is renamed over the old one. If the folder has a single file, its removal commits.

Steps after the commit change nothing for readers, and raise no error. Files of the old model are removed, and files
with spare names get usual names: each gets its usual name as a second name, a second index names these, and the spare
names are removed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from ..._engine import _C
from ..._engine.engine_errors import named_system_errors
from ..._storage.locks import serialize_commits
from ..._storage.open_storage import storage_at
from ..._storage.pending import Pending
from ..._storage.storage import COMMITTED_MEANWHILE
from ...errors import CheckpointError
from .model_names import (
    INDEX_NAME,
    SINGLE_NAME,
    SUFFIX,
    USUAL_DIGITS,
    file_names,
    is_model_file,
    is_temporary_index,
    single_file_counts,
)

logger = logging.getLogger(__name__)

IndexOf = Callable[[list[str]], bytes]  # makes the index of files with these names


@dataclass(frozen=True)
class _Before:
    """The names in the folder when a commit begins."""

    names: frozenset[str]
    named: frozenset[str]  #: names in the index; empty if there is none or it cannot be read

    @property
    def has_model(self) -> bool:
        """Whether there is an index or a single file."""
        return not {INDEX_NAME, SINGLE_NAME}.isdisjoint(self.names)


def check_replaceable(directory: str) -> None:
    """Raises `CheckpointError` if the model in the folder cannot be replaced in one step."""
    before = _look(directory)
    if SINGLE_NAME in before.names and before.named and not single_file_counts(before.names, before.named):
        raise CheckpointError(
            f"the index in {directory} names {SINGLE_NAME} beside other files: no export can replace such a model "
            "in one step. Export into another folder, or remove the model first",
            path=directory,
        )


def commit_files(files: Pending, index: IndexOf, overwrite: bool) -> None:
    """Makes `files`, which are complete and durable, the model of their folder, durably. If this raises, they stay
    pending, unless an index names them already. With `overwrite=False` raises `CheckpointError` if the folder holds a
    model."""
    directory = files.directory
    with named_system_errors(directory), serialize_commits(directory) as alone:
        before = _look(directory)
        if not overwrite and before.has_model:
            raise holds_model(directory, COMMITTED_MEANWHILE)
        try:
            names = _commit(files, index, before, overwrite)
        except FileExistsError:  # without locks in the file system, another export commits at the same time
            raise holds_model(directory, COMMITTED_MEANWHILE) from None
        except BaseException:
            if _are_named(files):  # a rename that reported a failure took effect
                files.committed()
            raise
        try:
            _tidy(directory, before, names, index)
            if alone:
                _remove_indexes(directory, before)
        except Exception as error:  # an export that has committed must not fail here
            logger.warning("the export to %s is complete, but the clean-up after it failed: %r", directory, error)


def holds_model(directory: str, when: str = "") -> CheckpointError:
    return CheckpointError(f"{directory} holds a model already and overwrite=False{when}", path=directory)


def _commit(files: Pending, index: IndexOf, before: _Before, overwrite: bool) -> list[str]:
    storage = storage_at(files.directory)
    if len(files.paths) == 1:
        files.storage.make_durable(holds_one=before.has_model)
        files.give_names([SINGLE_NAME], overwrite)
        files.committed()
        storage.sync()
        return [SINGLE_NAME]
    names = _free_names(len(files.paths), before)
    files.give_names(names, overwrite)
    storage.sync()
    storage.commit(INDEX_NAME, index(names), overwrite)
    files.committed()
    if SINGLE_NAME in before.names:
        storage.remove(SINGLE_NAME)
        storage.sync()
    return names


def _tidy(directory: str, before: _Before, names: list[str], index: IndexOf) -> None:
    storage = storage_at(directory)
    if names == [SINGLE_NAME]:
        if INDEX_NAME in before.names:
            storage.remove(INDEX_NAME)
            storage.sync()  # the files that the index names are removed after this
        _remove_models(directory, before, names)
        return
    _remove_models(directory, before, names)
    usual = file_names(len(names))
    if names == usual:
        return
    for name, usual_name in zip(names, usual, strict=True):
        _C.link_file(os.path.join(directory, name), os.path.join(directory, usual_name))
    storage.sync()
    storage.write(INDEX_NAME, index(usual))
    for name in names:
        storage.remove(name)


def _free_names(count: int, before: _Before) -> list[str]:
    # Without an index and a single file, all files with usual names are the model. Spare names do not add to it.
    digits = (
        USUAL_DIGITS
        if before.has_model or not any(name.endswith(SUFFIX) for name in before.names)
        else USUAL_DIGITS + 1
    )
    while not before.names.isdisjoint(names := file_names(count, digits)):
        digits += 1
    return names


def _remove_models(directory: str, before: _Before, but: list[str]) -> None:
    """Removes files of other models, known by their names or by the index before."""
    storage = storage_at(directory)
    for name in sorted(storage.names()):
        is_of_model = is_model_file(name) or (name in before.named and name.endswith(SUFFIX))
        if is_of_model and name not in but:
            storage.remove(name)


def _remove_indexes(directory: str, before: _Before) -> None:
    """Removes temporary indexes of exports that died. Needs the lock: no other export commits then."""
    for name in filter(is_temporary_index, before.names):
        storage_at(directory).remove(name)


def _look(directory: str) -> _Before:
    return _Before(frozenset(names_in(directory)), frozenset(_named(directory) or ()))


def names_in(directory: str) -> list[str]:
    """Returns all names in a folder; none if it is missing. In an object store it is missing until the first write."""
    try:
        return storage_at(directory).names()
    except FileNotFoundError:
        return []


def _named(directory: str) -> set[str] | None:
    """The files that the index in a folder names. None if the index cannot be read."""
    try:
        content = json.loads(storage_at(directory).read(INDEX_NAME).decode())
        return {name for name in content["weight_map"].values() if isinstance(name, str)}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _are_named(files: Pending) -> bool:
    named = _named(files.directory)
    return named is None or any(os.path.basename(path) in named for path in files.paths)
