"""How complete files become the model of a folder, so that at every instant it holds the old model or the new one:
for readers that prefer the single file to the index, as loads of ours and transformers do, and after a power cut.

One change of one name decides, and is durable before anything of the old model goes:

- a single file: its rename over the one before. An index beside it counts for nothing from then on.
- several: they get names that no file in the folder has, so that the old index still names its own files; then the new
  index takes the place of the old one by a rename. Where there is a single file, removing it decides.

What is left to do then is no matter for readers, and no error is raised for it: files of the old model go, and files
with spare names get usual ones, as second names that a second index says before the spare ones go.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import _C, engine, layout
from .errors import CheckpointError
from .export_names import (
    INDEX_NAME,
    SINGLE_NAME,
    SUFFIX,
    USUAL_DIGITS,
    file_names,
    is_model_file,
    is_temporary_index,
    rules_alone,
)
from .whole_file import temporary_name

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 60.0  # for another export's commit, which takes some renames and syncs
_POLL_SECONDS = 0.02

IndexOf = Callable[[list[str]], bytes]  # the index of files with these names


@dataclass(frozen=True)
class _Before:
    """What is in the folder when a commit begins."""

    names: frozenset[str]
    named: frozenset[str]  #: by the index; empty if there is none or it cannot be read


def check_replaceable(directory: str) -> None:
    """Raises `CheckpointError` for a model that nothing can take the place of in one step."""
    before = _look(directory)
    if SINGLE_NAME in before.names and before.named and not rules_alone(before.names, before.named):
        raise CheckpointError(
            f"the index in {directory} names {SINGLE_NAME} beside other files: no export can replace such a model "
            "in one step. Export into another folder, or remove the model first",
            path=directory,
        )


def replace_model(directory: str, files: list[str], index: IndexOf) -> None:
    """Makes complete and durable files the model of a folder, durably.

    Args:
        files: their paths, in the folder. Where they are now, if this raises; emptied when they belong to the folder.
    """
    with engine.named_system_errors(directory), _alone_in(directory) as alone:
        before = _look(directory)
        try:
            names = _commit(directory, files, index, before)
        except BaseException:
            if _are_named(directory, files):  # a rename that was reported as failed, and was not
                files.clear()
            raise
        try:
            _tidy(directory, before, names, index)
            if alone:
                _remove_indexes(directory, before)
        except Exception as error:  # no reason to fail an export that has committed
            logger.warning("the export to %s is complete, but not all cleaned up after: %r", directory, error)


def give_names(directory: str, files: list[str], names: list[str]) -> None:
    """Renames files, without making that durable. `files` tells where they are, whatever happens."""
    for number, name in enumerate(names):
        path = os.path.join(directory, name)
        _C.rename_file(files[number], path)
        files[number] = path


def _commit(directory: str, files: list[str], index: IndexOf, before: _Before) -> list[str]:
    layout.make_name_durable(directory, holds_one=not {INDEX_NAME, SINGLE_NAME}.isdisjoint(before.names))
    if len(files) == 1:
        give_names(directory, files, [SINGLE_NAME])
        files.clear()
        _C.sync_directory(directory)
        return [SINGLE_NAME]
    names = _free_names(len(files), before)
    give_names(directory, files, names)
    _C.sync_directory(directory)
    _put_index(directory, index(names))
    files.clear()
    _C.sync_directory(directory)
    if SINGLE_NAME in before.names:
        _C.remove_file(os.path.join(directory, SINGLE_NAME))
        _C.sync_directory(directory)
    return names


def _tidy(directory: str, before: _Before, names: list[str], index: IndexOf) -> None:
    if names == [SINGLE_NAME]:
        if INDEX_NAME in before.names:
            _C.remove_file(os.path.join(directory, INDEX_NAME))
            _C.sync_directory(directory)  # before files go that it names
        _remove_models(directory, before, names)
        return
    _remove_models(directory, before, names)
    usual = file_names(len(names))
    if names == usual:
        return
    for name, usual_name in zip(names, usual, strict=True):
        _C.link_file(os.path.join(directory, name), os.path.join(directory, usual_name))
    _C.sync_directory(directory)
    _put_index(directory, index(usual))
    _C.sync_directory(directory)
    for name in names:
        _C.remove_file(os.path.join(directory, name))


def _free_names(count: int, before: _Before) -> list[str]:
    has_model = not {INDEX_NAME, SINGLE_NAME}.isdisjoint(before.names)
    # Where neither says what the model is, all files are: usual names would add to it.
    digits = USUAL_DIGITS if has_model or not any(name.endswith(SUFFIX) for name in before.names) else USUAL_DIGITS + 1
    while not before.names.isdisjoint(names := file_names(count, digits)):
        digits += 1
    return names


def _put_index(directory: str, content: bytes) -> None:
    path = os.path.join(directory, INDEX_NAME)
    while os.path.lexists(temporary := temporary_name(path)):  # of a process of this number that was killed
        pass
    _C.write_durably(temporary, content)
    try:
        _C.rename_file(temporary, path)
    except BaseException:
        with contextlib.suppress(_C.EngineError):
            _C.remove_file(temporary)
        raise


def _remove_models(directory: str, before: _Before, but: list[str]) -> None:
    """Files of other models: by their names, and what the index before named."""
    for name in sorted(os.listdir(directory)):
        is_of_model = is_model_file(name) or (name in before.named and name.endswith(SUFFIX))
        if is_of_model and name not in but:
            _C.remove_file(os.path.join(directory, name))


def _remove_indexes(directory: str, before: _Before) -> None:
    """Those that exports were writing when they died: nobody else commits now."""
    for name in filter(is_temporary_index, before.names):
        _C.remove_file(os.path.join(directory, name))


def _look(directory: str) -> _Before:
    return _Before(frozenset(os.listdir(directory)), frozenset(_named(directory) or ()))


def _named(directory: str) -> set[str] | None:
    """Files that the index in a folder names. None if it cannot be read."""
    try:
        with open(os.path.join(directory, INDEX_NAME), encoding="utf-8") as file:
            return {name for name in json.load(file)["weight_map"].values() if isinstance(name, str)}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _are_named(directory: str, files: list[str]) -> bool:
    named = _named(directory)
    return named is None or any(os.path.basename(path) in named for path in files)


@contextlib.contextmanager
def _alone_in(directory: str) -> Iterator[bool]:
    """Two exports that finish at the same time do so one after the other. Whether that is so: not where the file system
    has no locks."""
    lock = layout.FileLock(None, os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        until = time.monotonic() + _WAIT_SECONDS
        while (alone := lock.try_alone()) is False:
            if time.monotonic() > until:
                raise CheckpointError(f"another export has been finishing in {directory} for {_WAIT_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        yield alone is True
    finally:
        lock.release()
