"""Makes entries of a report from errors, and errors from a report, for verifications."""

from __future__ import annotations

from .._storage.open_storage import is_inconclusive
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import Damage, VerifyReport


def add_error(report: VerifyReport, error: CheckpointError, file: str) -> None:
    """Adds an error to a report as damage, or as unreadable if the error says nothing about the file."""
    unreadable = is_inconclusive(getattr(error, "errno", None), getattr(error, "path", file))
    (report.unreadable if unreadable else report.damaged).append(as_damage(error, file))


def as_damage(error: CheckpointError, file: str) -> Damage:
    """Makes an entry of a report from an error."""
    return Damage(getattr(error, "key", None), getattr(error, "file", file), getattr(error, "offset", 0), str(error))


def raise_damage(found: VerifyReport) -> None:
    """Raises `CorruptCheckpointError` for the first damage of a report, or else `CheckpointError` for what could not be
    read."""
    if not found.damaged and found.unreadable:
        raise CheckpointError(found.reason, path=found.unreadable[0].file)
    if not found.damaged:
        return
    first, more = found.damaged[0], len(found.damaged) - 1
    reason = first.reason if first.key is None or first.key in first.reason else f"{first.key}: {first.reason}"
    where = "" if first.file in reason else f" in {first.file} at {first.offset}"
    text = reason + where + (f" (and {more:,} more)" if more else "")
    raise CorruptCheckpointError(text, key=first.key, file=first.file, offset=first.offset)
