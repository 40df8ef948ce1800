"""Advice for keys that a checkpoint lacks: they have other names, belong to each rank, or were not saved."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate, islice

from .key_selection import rename_function

_NAMED_STATE = re.compile(r"\bstate\..+\.")  # of an optimizer; it is found by numbers where it is stored by numbers
_OF_RANK = re.compile(r"(.+)\.rank_\d+_of_\d+")  # `PerRank` names the values of ranks so


def advice_for_missing(missing: Sequence[str], unexpected: Sequence[str], found: Sequence[str], renamed: bool) -> str:
    """Returns what mends a load; empty if that is unknown.

    All names are those of the checkpoint, which has the keys `unexpected` and `found`. `renamed`: whether the load
    renames keys.
    """
    keys = {*unexpected, *found}
    stored = {prefix for key in keys for prefix in _prefixes(key)}
    of_ranks = {match[1] for match in map(_OF_RANK.fullmatch, keys) if match}
    whole = [key for key in missing if not _OF_RANK.fullmatch(key)]
    forgotten = dict.fromkeys(prefix for key in whole for prefix in _prefixes(key) if prefix in of_ranks)
    texts = [
        f"the checkpoint has a value of each rank under {key!r}: wrap it in PerRank, as in the save"
        for key in forgotten
    ]
    # A key below a stored value, or above some, is one of another structure, not of another name.
    other = [
        key
        for key in whole
        if key not in stored and not any(name in keys or name in forgotten for name in _prefixes(key))
    ]
    rename, hits = _suggest_rename(other, unexpected, found)
    if hits and not renamed:
        texts.append(f"{len(hits)} of the missing keys are stored under another name: rename={rename} finds them")
    texts.append(_not_saved([key for key in other if key not in hits], hits, stored))
    return "; ".join(filter(None, texts))


def _prefixes(key: str) -> list[str]:
    """The key and all its prefixes up to a dot, the shortest first."""
    return [*accumulate(key.split("."), "{}.{}".format)]


def _not_saved(missing: Iterable[str], renamable: Iterable[str], stored: Container[str]) -> str:
    """Advice for values that were saved with none of their keys, under no name. `stored`: prefixes of stored keys."""
    elsewhere = {prefix for key in renamable for prefix in _prefixes(key)}
    below: dict[str, list[str]] = {}
    for key in missing:
        below.setdefault(next(name for name in _prefixes(key) if name not in stored), []).append(key)
    lacks = {
        name: "no optimizer" if any(".param_groups." in key for key in keys) else "nothing"
        for name, keys in below.items()
        if len(keys) > 1 and name not in elsewhere
    }
    if not lacks:
        return ""
    names = [f"!{name}" for name in lacks]
    keys = f"keys={names if len(names) > 1 else names[0]!r}"
    what = ", ".join(f"{kind} under {name!r}" for name, kind in lacks.items())
    return f"the checkpoint has {what}, it was saved without: save it, too, or load all else, with {keys}"


def _suggest_rename(
    missing: Sequence[str], unexpected: Sequence[str], found: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the prefixes to rename, at most one for each first name of the missing keys, and {missing key: unexpected
    key} for what they find: at least half of the missing keys with that first name. Keys in `found` keep their
    names."""
    kept = {"", *(prefix for key in found for prefix in _prefixes(key))} if found else set()
    of_first_name: dict[str, list[str]] = {}
    for key in missing:
        of_first_name.setdefault(key.partition(".")[0], []).append(key)
    rename: dict[str, str] = {}
    all_hits: dict[str, str] = {}
    for keys in of_first_name.values():
        free = {*unexpected}.difference(all_hits.values())
        ends = {keys[0], keys[-1]}  # an optimizer has its state first and its groups last
        found_by = {pair: _hits(pair, keys, free) for key in ends for pair in _prefix_pairs(key, free, kept)}
        pair = max(found_by, key=lambda pair: (len(found_by[pair]), _likeness(*pair), pair), default=None)
        if pair is not None and 2 * len(found_by[pair]) >= len(keys):
            rename.update([pair])
            all_hits |= found_by[pair]
    return rename, all_hits


def _prefix_pairs(key: str, stored: Iterable[str], kept: Container[str]) -> Iterator[tuple[str, str]]:
    """Yields prefixes of a missing key and what to put in their places, by the stored keys with the longest common end.
    A prefix in `kept` is made longer."""
    parts = key.split(".")
    for cut in range(len(parts)):
        end = "." + ".".join(parts[cut:])
        alike = list(islice((name.split(".") for name in stored if f".{name}".endswith(end)), 10))
        ends = (at for at in range(cut, len(parts) + 1) if ".".join(parts[:at]) not in kept)
        for at in islice(ends, 1 if alike else 0):
            yield from ((".".join(parts[:at]), ".".join(name[: len(name) - len(parts) + at])) for name in alike)
        if alike:
            return


def _likeness(old: str, new: str) -> tuple[int, int]:
    """How alike two prefixes are."""
    return len({*old.split(".")} & {*new.split(".")}), -len(new)


def _hits(pair: tuple[str, str], missing: Iterable[str], stored: Container[str]) -> dict[str, str]:
    """Returns {missing key: stored key} for the keys that a load which renames a prefix finds."""
    of = rename_function(dict([pair]))
    names = {key: of(key) for key in missing}
    return {key: name for key, name in names.items() if name in stored or _NAMED_STATE.sub("state.0.", name) in stored}
