"""Makes entries of a report from errors, and errors from a report, for verifications."""

from __future__ import annotations

from .._storage.open_storage import is_inconclusive
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from ..reports import Damage, VerifyReport


def add_error(report: VerifyReport, error: CheckpointError, file: str) -> None:
    """Adds an error to a report: as unreadable if it proves nothing about the file, else as refused or damaged."""
    unreadable = is_inconclusive(getattr(error, "errno", None), getattr(error, "path", file))
    refused = report.refused if isinstance(error, UntrustedCheckpointError) else report.damaged
    (report.unreadable if unreadable else refused).append(
        Damage(getattr(error, "key", None), getattr(error, "file", file), getattr(error, "offset", 0), str(error))
    )


def raise_damage(found: VerifyReport) -> None:
    """Raises `CorruptCheckpointError` for the first damage of a report, or else `UntrustedCheckpointError` for what is
    refused, or else `CheckpointError` for what could not be read."""
    if not found.damaged and found.refused:
        raise UntrustedCheckpointError(found.reason, path=found.refused[0].file)
    if not found.damaged and found.unreadable:
        raise CheckpointError(found.reason, path=found.unreadable[0].file)
    if not found.damaged:
        return
    first, more = found.damaged[0], len(found.damaged) - 1
    reason = first.reason if first.key is None or first.key in first.reason else f"{first.key}: {first.reason}"
    where = "" if first.file in reason else f" in {first.file} at {first.offset}"
    text = reason + where + (f" (and {more:,} more)" if more else "")
    raise CorruptCheckpointError(text, key=first.key, file=first.file, offset=first.offset)
