"""Arguments of the public functions: what is none of what is wanted is refused by name before anything is done."""

from __future__ import annotations

import math
import operator
import os


def checked_flag(name: str, value: object) -> bool:
    """Raises ValueError for anything but True and False: a text such as "no" counts as true elsewhere."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: True or False is wanted")
    return value


def checked_count(name: str, value: object, most: int | None = None) -> int | None:
    """An option that is a number of something. Raises ValueError for what is none."""
    if value is None:
        return None
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or (most is not None and number > most):
        wanted = "at least 1" if most is None else f"1 to {most}"
        raise ValueError(f"{name}={value!r}: a whole number, {wanted}, is wanted, or None")
    return number


def checked_seconds(name: str, value: object, *, zero: bool) -> float | None:
    """An option that is a time. Raises ValueError for what is none. `zero`: whether none at all is one."""
    if value is None:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: seconds are wanted{'' if zero else ', more than 0'}, or None")
    return float(value)  # type: ignore[arg-type]


def checked_path(name: str, value: object) -> str | os.PathLike[str]:
    """Raises ValueError for what is no path, and for an empty one."""
    if not isinstance(value, (str, os.PathLike)):
        hint = f"; as bytes it is os.fsdecode({name})" if isinstance(value, bytes) else ""
        raise ValueError(f"{name}: a path or a file:// URL is wanted, not {type(value).__name__}{hint}")
    if not os.fspath(value):
        raise ValueError(f"{name}: a path is wanted, not an empty text (the working directory is '.')")
    return value
