"""Tells what a directory without a checkpoint holds, for errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import CheckpointError
from ..archive_entries import advice_for_directory
from ..safetensors import model_names
from . import step_order
from .metadata_file import NO_CHECKPOINT


@contextmanager
def explained(directory: str) -> Iterator[None]:
    """A context. If an error says that the directory has no metadata, adds what the directory holds, if it is known."""
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
    if advice := advice_for_directory(directory):
        return f"not a checkpoint; {advice}"
    try:
        last = step_order.SavedOrder(directory).last
    except OSError:
        return None
    if last is None:
        return None
    path = step_order.path_of(directory, last)
    return f"it holds the checkpoints of a CheckpointManager, of which {path} was saved last: give the path of one"
