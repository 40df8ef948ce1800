"""Selects the keys of a checkpoint that loads and conversions read, and maps keys of the state to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import translate

from ..errors import MissingKeysError

Rename = Mapping[str, str] | Callable[[str], str]


class Selection:
    """Selects keys by names and patterns.

    A name selects the key itself and the keys under it (`model` selects `model.layers.0.weight`). A pattern selects the
    keys that match it as `fnmatch` does (`*.exp_avg`). Names and patterns that begin with `!` exclude keys, wherever
    they stand, also what other names select. If all begin with `!`, all other keys are selected. None selects all keys.
    """

    def __init__(self, names: str | Iterable[str] | None) -> None:
        if names is not None and not isinstance(names, Iterable):
            raise TypeError(f"keys: expected names or patterns as text, got {type(names).__name__}")
        self.names: list[str] | None = [names] if isinstance(names, str) else list(names) if names is not None else None
        if self.names is not None and not all(isinstance(name, str) for name in self.names):
            raise TypeError("keys: expected names or patterns as text")
        self._given = self.names
        left_out = [name[1:] for name in self.names or () if name.startswith("!")]
        self._left_out = Selection(left_out) if left_out else None
        if left_out:
            self.names = [name for name in self.names or () if not name.startswith("!")] or None
        self._exact = frozenset(self.names or ())
        patterns = [name for name in self._exact if any(sign in name for sign in "*?[")]
        under = [re.escape(name) + r"\..*" for name in self._exact if name]
        self._pattern = re.compile("|".join([*map(translate, patterns), *under]) or "(?!)", re.DOTALL)

    def __contains__(self, key: str) -> bool:
        if self._left_out is not None and key in self._left_out:
            return False
        return self.names is None or self._is_named(key)

    def _is_named(self, key: str) -> bool:
        return key in self._exact or self._pattern.fullmatch(key) is not None

    def of(self, keys: Iterable[str]) -> list[str]:
        if self.names is None and self._left_out is None:
            return list(keys)
        return [key for key in keys if key in self]

    def without_match(self, keys: Collection[str]) -> list[str]:
        """Returns the names and patterns that none of `keys` has, except those with `!`. Raises `MissingKeysError` if
        all have some, and none of `keys` is selected: all are excluded, or there are no names."""
        named = {key for key in keys if self._is_named(key)} if self.names else ()
        found = [
            name for name in self.names or () if name not in named and not any(map(Selection(name).__contains__, named))
        ]
        if keys and not found and not any(map(self.__contains__, keys)):
            raise MissingKeysError(
                [], hint=f"keys={self._given!r} selects nothing: names with ! exclude what others select"
            )
        return found

    def check(self, keys: Collection[str]) -> None:
        """Raises `MissingKeysError` for names and patterns that none of `keys` has, except those with `!`, and if none
        is selected."""
        if missing := self.without_match(keys):
            raise MissingKeysError(missing)


def rename_function(rename: Rename | None) -> Callable[[str], str]:
    """Returns a function from a key of the state to the key of the checkpoint.

    A mapping maps keys of the state, or prefixes of them that end before a dot, to those of the checkpoint. The longest
    prefix that fits is used. An empty prefix fits every key.
    """
    if rename is None:
        return same_key
    if not callable(rename) and not isinstance(rename, Mapping):
        raise ValueError(f"rename: expected a function, a mapping of keys or None, got {type(rename).__name__}")
    if isinstance(rename, Mapping) and not all(isinstance(text, str) for pair in rename.items() for text in pair):
        raise ValueError("rename: keys are texts with dots between their parts, on both sides")
    return rename if callable(rename) else _by_prefix(rename)


def same_key(key: str) -> str:
    return key


def rename_keys(keys: Iterable[str], of: Callable[[str], str]) -> dict[str, str]:
    """Returns {key of the state: key of the checkpoint}. Raises `ValueError` if two keys would become one."""
    if of is same_key:
        return {key: key for key in keys}
    result = {}
    back: dict[str, str] = {}
    for key in keys:
        name = of(key)
        if not isinstance(name, str) or (key and not name):
            raise ValueError(f"rename gives {name!r} as the checkpoint's key of {key!r}")
        first = back.setdefault(name, key)
        if first != key:
            raise ValueError(f"rename gives {first!r} and {key!r} the same key of the checkpoint, {name!r}")
        result[key] = name
    return result


def renamed_if_known(rename: Callable[[str], str], key: str) -> str:
    """Returns the checkpoint's key for a key that the state may lack. Empty if `rename` raises for such a key."""
    try:
        return rename(key)
    except Exception:
        return ""


def _by_prefix(mapping: Mapping[str, str]) -> Callable[[str], str]:
    def of(key: str) -> str:
        end = len(key)
        while True:
            old = key[:end]
            if old in mapping:
                return ".".join(part for part in (mapping[old], key[end:].removeprefix(".")) if part)
            if not end:
                return key
            end = max(key.rfind(".", 0, end), 0)

    return of
