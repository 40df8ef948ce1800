"""Defines the public errors of the package. All can be pickled, because ranks send them to each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = [
    "CheckpointError",
    "CheckpointTimeoutError",
    "CorruptCheckpointError",
    "IncompatibleStateError",
    "LoadFailedError",
    "Mismatch",
    "MissingKeysError",
    "RankFailedError",
    "SaveCancelledError",
    "SaveFailedError",
    "SaveInProgressError",
    "StateDiffersError",
    "StorageFullError",
    "UntrustedCheckpointError",
]

_NOTHING = "; nothing was committed"


class CheckpointError(RuntimeError):
    """Base class of all errors of this package. Names and numbers in an error's message are also its attributes."""

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[CheckpointError], attributes: dict[str, Any]) -> CheckpointError:
    error = kind.__new__(kind)
    RuntimeError.__init__(error, attributes["message"])
    error.__dict__.update(attributes)
    return error


class CorruptCheckpointError(CheckpointError):
    """Bytes on disk differ from what was written: a flipped bit, a truncated or missing file."""

    key: str | None  #: name of the tensor or object; None if the damage belongs to none
    file: str
    offset: int  #: bytes from the start of the file

    def __init__(self, message: str, *, key: str | None, file: str, offset: int = 0) -> None:
        super().__init__(message, key=key, file=file, offset=offset)


class Mismatch(NamedTuple):
    """A key whose shape, dtype or kind differs between the state and the checkpoint."""

    key: str
    expected: str  #: the shape, dtype or kind in the state
    found: str  #: the shape, dtype or kind in the checkpoint

    def __str__(self) -> str:
        return f"{self.key}: the state to load into has {self.expected}, the checkpoint has {self.found}"


class IncompatibleStateError(CheckpointError):
    """A shape, dtype or kind in the state to fill differs from the checkpoint."""

    key: str  #: this and the next two fields are those of `mismatched[0]`
    expected: str
    found: str
    mismatched: list[Mismatch]

    def __init__(self, key: str, expected: object, found: object, others: Sequence[Mismatch] = ()) -> None:
        mismatched = [Mismatch(key, str(expected), str(found)), *others]
        super().__init__("; ".join(map(str, mismatched)), **mismatched[0]._asdict(), mismatched=mismatched)


class MissingKeysError(CheckpointError):
    """The state has keys that the checkpoint lacks. With `strict`, also: the checkpoint has keys of a module or
    optimizer that the state lacks."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[Mismatch]

    def __init__(
        self,
        missing: list[str],
        unexpected: list[str] | None = None,
        mismatched: Sequence[Mismatch] = (),
        hint: str = "",
    ) -> None:
        unexpected = unexpected or []
        parts = [
            f"{len(keys)} key{'s' if len(keys) != 1 else ''} {what}: {some([*map(repr, keys)])}"
            for keys, what in ((missing, "missing from the checkpoint"), (unexpected, "not in the state"))
            if keys
        ]
        parts.extend(map(str, mismatched))
        advice = _names_for_numbers(missing, unexpected) or _other_optimizers(missing)
        parts.extend(advice or ([hint] if hint else []))
        super().__init__("; ".join(parts), missing=missing, unexpected=unexpected, mismatched=list(mismatched))


class UntrustedCheckpointError(CheckpointError):
    """The checkpoint is unsafe to load: it would run code, names a path outside its directory, or claims more bytes
    than its files contain."""


class StateDiffersError(CheckpointError):
    """A state is not what its checkpoint holds: `prove` found differences."""

    different: dict[str, str]  #: {key: what differs}
    missing: list[str]  #: keys of the checkpoint that the state does not have
    unexpected: list[str]  #: keys of the state that the checkpoint does not have
    replicas: dict[str, tuple[int, int]]  #: {key: two ranks that hold different values}


class StorageFullError(CheckpointError):
    """The storage has no space for the checkpoint: bytes, quota or inodes are exhausted, or file sizes are limited; the
    message names which. Nothing was committed, and the old checkpoint is intact. One exception, which the message
    reports: with a folder on each machine, one may lack space for its metadata after others have committed."""

    path: str
    needed: int  #: bytes
    free: int  #: bytes

    def __init__(self, path: str, needed: int, free: int, cause: str = "", what: str = "") -> None:
        super().__init__(
            (what or f"no room in {path}: {needed:,} bytes needed, {free:,} free")
            + _NOTHING
            + (f" ({cause})" if cause else ""),
            path=path,
            needed=needed,
            free=free,
        )

    def in_doubt(self) -> CheckpointError:
        """Returns this error for the case that other machines may have committed."""
        text = self.message.replace(_NOTHING, "; other machines may have committed")
        return _rebuild(type(self), {**self.__dict__, "message": text})


class CheckpointTimeoutError(CheckpointError):
    """Ranks did not arrive in time: they were late, died, or left with an error of their own."""

    phase: str  #: the step that the ranks were in
    late_ranks: list[int]  #: ranks in the process group; empty if unknown
    committed: bool | None  #: for a save: whether the new checkpoint was committed; None if unknown

    def __init__(self, phase: str, late_ranks: list[int], message: str = "", *, committed: bool | None = False) -> None:
        super().__init__(
            message or f"{phase}: ranks {late_ranks} did not come in time",
            phase=phase,
            late_ranks=late_ranks,
            committed=committed,
        )


class RankFailedError(CheckpointError):
    """Raised on all ranks if a rank failed with an error that does not belong to this package."""

    rank: int  #: the lowest failed rank
    cause: BaseException | str  #: that rank's exception, or its text if it cannot be pickled
    failures: dict[int, str]  #: {failed rank: message of its error}

    def __init__(
        self, rank: int, cause: BaseException | str, message: str = "", failures: dict[int, str] | None = None
    ) -> None:
        super().__init__(
            message or f"rank {rank}: {cause}", rank=rank, cause=cause, failures=failures or {rank: str(cause)}
        )


class SaveFailedError(RankFailedError):
    """A rank failed in a save with an error that does not belong to this package. Nothing was committed."""


class SaveInProgressError(CheckpointError):
    """The previous save is still running, and the caller passed `on_busy="raise"` or "skip"."""


class SaveCancelledError(CheckpointError):
    """A save was cancelled, on this rank or another. Nothing was committed, and the save's files were removed."""

    path: str  #: the directory of the save
    cancelled_by: int  #: the first rank that cancelled it


class LoadFailedError(RankFailedError):
    """A rank failed in a load with an error that does not belong to this package. The content of the tensors to fill is
    undefined."""


def of_rank(error: CheckpointError, rank: int, message: str, failures: dict[int, str]) -> CheckpointError:
    """Returns the error that other ranks raise: the same class and attributes, plus the failed rank."""
    return _rebuild(type(error), {**error.__dict__, "message": message, "rank": rank, "failures": failures})


def _names_for_numbers(missing: list[str], unexpected: list[str]) -> list[str]:
    """Returns advice for optimizers whose parameters are numbered in the state and named in the checkpoint."""
    numbered = {match[1] for match in map(re.compile(r"(.*?\bstate\.)\d+\.[^.]+").fullmatch, missing) if match}
    return [
        f"the checkpoint has {prefix}* by names of parameters, not by numbers: load the optimizer together with the "
        "module that owns them"
        for prefix in sorted(numbered)
        if any(re.fullmatch(re.escape(prefix) + r"(?!\d+\.[^.]+$).+\.[^.]+", key) for key in unexpected)
    ]


def _other_optimizers(missing: list[str]) -> list[str]:
    """Returns advice for optimizers of another class than the saved one, which has other options and state."""
    options: dict[str, dict[str, None]] = {}  # of each optimizer, in order
    for match in map(re.compile(r"(.*?)\bparam_groups\.0\.(\w+)").fullmatch, missing):
        if match and f"{match[1]}param_groups.0.params" not in missing:
            options.setdefault(match[1], {})[match[2]] = None
    return [
        f"the checkpoint has another kind of optimizer, without {some([*names])}: load into one of its kind, or "
        f"leave it out (keys='!{prefix.removesuffix('.') or 'state'}')"
        for prefix, names in options.items()
    ]


def some(names: Sequence[str], most: int = 10) -> str:
    """Joins the first `most` names, and appends the number of the remaining ones."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
