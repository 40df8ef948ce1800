"""New names by rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from ..selection import Rename, renaming

#: As for `load`, or pairs of a regular expression and what takes its place.
RenameRules = Rename | Sequence[tuple[str, str]]


def renaming_by_rules(rename: RenameRules | None) -> Callable[[str], str]:
    """From a key of the source to its new name. Rules are applied one after another, each to what the one before has
    made, as `re.sub` does. Raises ValueError for what is no rule."""
    if rename is None or callable(rename) or hasattr(rename, "keys"):
        return renaming(rename)  # type: ignore[arg-type]
    if isinstance(rename, str) or not isinstance(rename, Iterable):
        kind = type(rename).__name__
        raise ValueError(f"rename: a function, a mapping of names or pairs of texts are wanted, or None, not {kind}")
    rules = []
    for rule in rename:
        try:
            pattern, replacement = rule
            rules.append((re.compile(pattern), replacement))
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(f"rename: {rule!r} is no pair of a regular expression and a text: {error}") from None

    def of(key: str) -> str:
        for pattern, replacement in rules:
            key = pattern.sub(replacement, key)
        return key

    return of
