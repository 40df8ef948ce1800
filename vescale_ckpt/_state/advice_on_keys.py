"""Advice for keys that a checkpoint lacks: they have other names, belong to each rank, or were not saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice

from .key_selection import rename_function

_MOST_PREFIXES = 4  # a longer mapping is not worth reading
_NAMED_STATE = re.compile(r"\bstate\..+\.")  # of an optimizer; it is found by numbers where it is stored by numbers
_OF_RANK = re.compile(r"(.+)\.rank_\d+_of_\d+")  # `PerRank` names the values of ranks so


def advice_for_missing(missing: Sequence[str], unexpected: Sequence[str], found: Sequence[str], renamed: bool) -> str:
    """Returns what mends a load; empty if that is unknown.

    All names are those of the checkpoint, which has the keys `unexpected` and `found`. `renamed`: whether the load
    renames keys.
    """
    keys = {*unexpected, *found}
    stored = {prefix for key in keys for prefix in _prefixes(key)}
    of_ranks, wanted_of_ranks = (
        {match[1] for match in map(_OF_RANK.fullmatch, each) if match} for each in (keys, missing)
    )
    asked = dict.fromkeys(prefix for key in missing for prefix in _prefixes(key))
    forgotten = [key for key in asked if key in of_ranks and key not in wanted_of_ranks]
    needless = [key for key in asked if key in wanted_of_ranks and key in stored and key not in of_ranks]
    texts = [
        f"the checkpoint has a value of each rank under {key!r}: wrap it in PerRank, as in the save"
        for key in forgotten
    ]
    texts += [f"the checkpoint has one value of all ranks under {key!r}: load it without PerRank" for key in needless]
    explained = {*forgotten, *needless}
    # A key below a stored value, or above some, is one of another structure, not of another name.
    other = [
        key
        for key in missing
        if key not in stored and not any(name in keys or name in explained for name in _prefixes(key))
    ]
    renaming, renamable = _other_names(other, unexpected, found, renamed)
    texts += [renaming, _not_saved([key for key in other if key not in {*renamable}], renamable, stored)]
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


def _other_names(
    missing: Sequence[str], unexpected: Sequence[str], found: Sequence[str], renamed: bool
) -> tuple[str, Collection[str]]:
    """Advice for keys that are stored under other names, and these keys. What it proposes was tried: it finds as many
    keys as the text says, and those in `found` keep their names."""
    prefixes, hits = suggest_rename(missing, unexpected, found)
    if not hits:
        return "", hits
    if renamed:
        how = f"rename= does not give that name, as {unexpected[0]!r}"
        return f"{len(hits)} of the missing keys are stored under another name, and {how}", hits
    return f"{len(hits)} of the missing keys are stored under another name: rename={prefixes} finds them", hits


def suggest_rename(
    missing: Sequence[str], unexpected: Sequence[str], found: Sequence[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the prefixes to rename that find most of the missing keys among the unexpected ones, and
    {missing key: unexpected key} for what they find. Each prefix finds at least half of the keys below it. Keys in
    `found` keep their names."""
    kept = {"", *(prefix for key in found for prefix in _prefixes(key))} if found else set()
    rename: dict[str, str] = {}
    all_hits: dict[str, str] = {}
    left, free = [*missing], {*unexpected}
    while left and len(rename) < _MOST_PREFIXES:
        of_each_name = {key.partition(".")[0]: key for key in left}.values()
        pairs = {pair for key in [*left[:3], *islice(of_each_name, 8)] for pair in _prefix_pairs(key, free, kept)}
        best = max(sorted(pairs), key=partial(_merit, missing=left, stored=free), default=None)
        if best is None or not _merit(best, left, free)[0]:
            break
        rename.update([best])
        hits = _hits(rename_function(rename), left, free)
        left = [key for key in left if key not in hits]
        free.difference_update(hits.values())
        all_hits |= hits
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


def _merit(pair: tuple[str, str], missing: Sequence[str], stored: Container[str]) -> tuple[int, int, int]:
    """How many keys a prefix finds, 0 if less than half of those below it; then how alike both sides are."""
    old, new = pair
    below = [key for key in missing if not old or key == old or key.startswith(f"{old}.")]
    hits = len(_hits(rename_function(dict([pair])), below, stored))
    return hits if 2 * hits >= len(below) else 0, len({*old.split(".")} & {*new.split(".")}), -len(new)


def _hits(of: Callable[[str], str], missing: Iterable[str], stored: Container[str]) -> dict[str, str]:
    """Returns {missing key: stored key} for the keys that a load with `rename=of` finds."""
    names = {key: of(key) for key in missing}
    return {key: name for key, name in names.items() if name in stored or _NAMED_STATE.sub("state.0.", name) in stored}
