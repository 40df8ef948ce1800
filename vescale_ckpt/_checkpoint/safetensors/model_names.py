"""Defines the file names of Hugging Face's layout for all modules that write, read or remove such files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from ..._storage.open_storage import storage_at
from ..._storage.pending import final_name

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SUFFIXES = (SUFFIX, INDEX_SUFFIX)
USUAL_DIGITS = 5

_MODEL_FILE = re.compile(r"(shard-\d{5,}-)?model(-\d{5,}-of-\d{5,})?\.safetensors")
_SEVERAL = re.compile(r"model-\d{5,}-of-(?!0+1\.)\d{5,}\.safetensors")
_SPARE = re.compile(r"model-\d{5,}-of-0\d{5,}\.safetensors")  # usual names have no zero before five digits
_OF_SAVE = re.compile(r"model-([0-9a-f]{8})-\d{5,}-of-\d{5,}\.safetensors")
_TEMPORARY = re.compile(_MODEL_FILE.pattern + r"\.tmp\.([0-9a-f]{8})")


def file_names(count: int, digits: int = USUAL_DIGITS) -> list[str]:
    """Returns the names of `count` files that together are one model. Names with more digits than usual are spare
    names: readers use such files only if an index names them."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:0{digits}}-of-{count:0{digits}}.safetensors" for number in range(1, count + 1)]


def object_names(count: int, token: str) -> list[str]:
    """Returns the names of `count` files that a save writes to an object store, which has no renames. No other save
    uses these names. Readers use such files only if an index names them."""
    return [
        f"model-{token}-{number:0{USUAL_DIGITS}}-of-{count:0{USUAL_DIGITS}}.safetensors"
        for number in range(1, count + 1)
    ]


def token_of_object(name: str) -> str | None:
    """Returns the token in a name of `object_names`, the same for all files of one save. None for other names."""
    found = _OF_SAVE.fullmatch(name)
    return None if found is None else found[1]


def temporary_name(name: str, token: str) -> str:
    """The name of a file while it is written. Readers that take every `*.safetensors` in a folder ignore it."""
    return f"{name}.tmp.{token}"


def is_model_file(name: str) -> bool:
    return _MODEL_FILE.fullmatch(name) is not None


def is_temporary_index(name: str) -> bool:
    return final_name(name) == INDEX_NAME


def token_of(name: str) -> str | None:
    """The token in a temporary name, the same for all files of one export; None if `name` is not temporary."""
    found = _TEMPORARY.fullmatch(name)
    return None if found is None else found[3]


def holds_unfinished_export(directory: str) -> bool:
    """Whether a folder has files of an export, but no index or single file: the export ended before its commit."""
    with contextlib.suppress(OSError):
        names = storage_at(directory).names()
        if INDEX_NAME not in names and SINGLE_NAME not in names:
            others = without_index(names)
            if others:
                return any(_SEVERAL.fullmatch(name) for name in others)
            return any(_needs_index(name) or token_of(name) is not None for name in names)
    return False


def without_index(names: Iterable[str]) -> list[str]:
    """Returns the files that are a folder's model if there is no index. `names`: all names in the folder."""
    found = sorted(name for name in names if name.endswith(SUFFIX) and not _needs_index(name))
    return [SINGLE_NAME] if SINGLE_NAME in found else found


def _needs_index(name: str) -> bool:
    return (_SPARE.fullmatch(name) or _OF_SAVE.fullmatch(name)) is not None


def single_file_counts(names: Collection[str], named: AbstractSet[str]) -> bool:
    """Whether the single file in a folder is the whole model; transformers decides it so, too. `named`: the files that
    the folder's index names. An index that names only other files belongs to an older or newer model."""
    return SINGLE_NAME in names and (SINGLE_NAME not in named or named == {SINGLE_NAME})


def holds_export(directory: str) -> bool:
    return any(storage_at(directory).has(name) for name in (INDEX_NAME, SINGLE_NAME))
