"""Describes what a directory without a checkpoint holds, for the error message."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .._checkpoint.native import step_order
from .._checkpoint.native.metadata_file import NO_CHECKPOINT
from .._checkpoint.safetensors import model_names
from .._storage import file_kinds
from ..errors import CheckpointError


@contextmanager
def explained(directory: str) -> Iterator[None]:
    """Adds to an error raised within it, that a directory has no metadata, what the directory holds, if known."""
    try:
        yield
    except CheckpointError as error:
        if getattr(error, "errno", None) != errno.ENOENT or not error.message.endswith(NO_CHECKPOINT):
            raise
        if (why := _what_it_holds(directory)) is None:
            raise
        text = error.message.removesuffix(NO_CHECKPOINT) + why
        raise CheckpointError(text, path=directory, errno=errno.ENOENT) from None


def _what_it_holds(directory: str) -> str | None:
    if model_names.holds_unfinished_export(directory):
        return "it holds an export that did not finish"
    if advice := file_kinds.advice_for_directory(directory):
        return f"not a checkpoint; {advice}"
    try:
        last = step_order.SavedOrder(directory).last
    except OSError:
        return None
    if last is None:
        return None
    path = step_order.path_of(directory, last)
    return f"it holds the checkpoints of a CheckpointManager, of which {path} was saved last: give the path of one"
