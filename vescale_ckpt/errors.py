"""What can go wrong, by name. Every error is picklable, because errors travel between ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class CheckpointError(RuntimeError):
    """Base of all errors of this package; what an error names it also carries as attributes."""

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
    """Bytes on disk are not what was written: a flipped bit, a truncated or missing file."""

    key: str | None  #: name of the tensor or object, None if the damage is not in one
    file: str
    offset: int  #: bytes from the start of the file

    def __init__(self, message: str, *, key: str | None, file: str, offset: int = 0) -> None:
        super().__init__(message, key=key, file=file, offset=offset)


class Mismatch(NamedTuple):
    """A key of which the state asks for something else than the checkpoint holds."""

    key: str
    expected: str  #: what the state asks for: a shape, a dtype, an object instead of a tensor
    found: str  #: what the checkpoint holds

    def __str__(self) -> str:
        return f"{self.key}: the state to load into has {self.expected}, the checkpoint has {self.found}"


class IncompatibleStateError(CheckpointError):
    """The state to fill has another shape or dtype than the checkpoint."""

    key: str  #: the first of `mismatched`, as are the next two
    expected: str
    found: str
    mismatched: list[Mismatch]

    def __init__(self, key: str, expected: object, found: object, others: Sequence[Mismatch] = ()) -> None:
        mismatched = [Mismatch(key, str(expected), str(found)), *others]
        super().__init__("; ".join(map(str, mismatched)), **mismatched[0]._asdict(), mismatched=mismatched)


class MissingKeysError(CheckpointError):
    """The state asks for keys that the checkpoint does not have (or, where strict, the other way round)."""

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
        parts.extend(_names_for_numbers(missing, unexpected))
        parts.extend([hint] if hint else [])
        super().__init__("; ".join(parts), missing=missing, unexpected=unexpected, mismatched=list(mismatched))


class UntrustedCheckpointError(CheckpointError):
    """The checkpoint wants what data has no business wanting: code, a path outside, memory it has no bytes for."""


class StorageFullError(CheckpointError):
    """No room for the checkpoint: no bytes, no quota, no inodes, or a limit on the size of files; the text says which.
    Nothing was committed; what was there before still is."""

    path: str
    needed: int  #: bytes
    free: int  #: bytes

    def __init__(self, path: str, needed: int, free: int, cause: str = "", what: str = "") -> None:
        super().__init__(
            (what or f"no room in {path}: {needed:,} bytes needed, {free:,} free")
            + "; nothing was committed"
            + (f" ({cause})" if cause else ""),
            path=path,
            needed=needed,
            free=free,
        )


class CheckpointTimeoutError(CheckpointError):
    """Ranks were waited for in vain: they were late, have died, or have left with an error of their own."""

    phase: str  #: what the ranks were doing
    late_ranks: list[int]  #: in the process group; empty if that cannot be known
    committed: bool | None  #: of a save: whether the checkpoint is there all the same; None if that cannot be known

    def __init__(self, phase: str, late_ranks: list[int], message: str = "", *, committed: bool | None = False) -> None:
        super().__init__(
            message or f"{phase}: ranks {late_ranks} did not come in time",
            phase=phase,
            late_ranks=late_ranks,
            committed=committed,
        )


class RankFailedError(CheckpointError):
    """What all ranks raise when one has failed with an error that is not of this package."""

    rank: int  #: the lowest that failed
    cause: BaseException | str  #: its exception; the text of one that cannot be pickled
    failures: dict[int, str]  #: the text of every failed rank's error

    def __init__(
        self, rank: int, cause: BaseException | str, message: str = "", failures: dict[int, str] | None = None
    ) -> None:
        super().__init__(
            message or f"rank {rank}: {cause}", rank=rank, cause=cause, failures=failures or {rank: str(cause)}
        )


class SaveFailedError(RankFailedError):
    """The same, in a save. Nothing was committed."""


class SaveInProgressError(CheckpointError):
    """The save before is not done, and the caller chose not to wait for it."""


class LoadFailedError(RankFailedError):
    """The same, in a load. What is in the tensors that were to be filled is not defined."""


def of_rank(error: CheckpointError, rank: int, message: str, failures: dict[int, str]) -> CheckpointError:
    """The error as the other ranks raise it: the same class and attributes, and whose it is."""
    return _rebuild(type(error), {**error.__dict__, "message": message, "rank": rank, "failures": failures})


def _names_for_numbers(missing: list[str], unexpected: list[str]) -> list[str]:
    """What to do about optimizers of which the state has the parameters' numbers, and the checkpoint their names."""
    numbered = {match[1] for match in map(re.compile(r"(.*?\bstate\.)\d+\.[^.]+").fullmatch, missing) if match}
    return [
        f"the checkpoint has {prefix}* by names of parameters, not by numbers: load the optimizer together with the "
        "module that owns them"
        for prefix in sorted(numbered)
        if any(re.fullmatch(re.escape(prefix) + r".+\.[^.]+\.[^.]+", key) for key in unexpected)
    ]


def some(names: Sequence[str], most: int = 10) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
