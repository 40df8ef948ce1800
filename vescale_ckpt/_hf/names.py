"""Names of the files of a model in Hugging Face's layout, and what a folder with such files is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from .._storage.directory import directory_at

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
USUAL_DIGITS = 5

_MODEL_FILE = re.compile(r"(shard-\d{5,}-)?model(-\d{5,}-of-\d{5,})?\.safetensors")
_SEVERAL = re.compile(r"model-\d{5,}-of-(?!0+1\.)\d{5,}\.safetensors")
_SPARE = re.compile(r"model-\d{5,}-of-0\d{5,}\.safetensors")  # usual names have no zero before five digits
_TEMPORARY = re.compile(_MODEL_FILE.pattern + r"\.tmp\.([0-9a-f]{8})")
_TEMPORARY_INDEX = re.compile(re.escape(INDEX_NAME) + r"\.tmp\.\d+\.\d+")


def file_names(count: int, digits: int = USUAL_DIGITS) -> list[str]:
    """Of `count` files that together are one model. With more digits than usual: spare names, under which files count
    only where an index names them."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:0{digits}}-of-{count:0{digits}}.safetensors" for number in range(1, count + 1)]


def name_of_rank(rank: int) -> str:
    """Of the file with what one rank holds, where ranks share no folder: as torch's HuggingFaceStorageWriter has it."""
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def temporary_name(name: str, token: str) -> str:
    """Of a file while it is written. Readers that take every `*.safetensors` in a folder do not see it."""
    return f"{name}.tmp.{token}"


def is_model_file(name: str) -> bool:
    return _MODEL_FILE.fullmatch(name) is not None


def is_temporary_index(name: str) -> bool:
    return _TEMPORARY_INDEX.fullmatch(name) is not None


def token_of(name: str) -> str | None:
    """What tells the files of one export from another's, if `name` is of one that is written."""
    found = _TEMPORARY.fullmatch(name)
    return None if found is None else found[3]


def holds_unfinished_export(directory: str) -> bool:
    """Whether there are files of an export, and none of those that make it a model: it was ended while it wrote."""
    with contextlib.suppress(OSError):
        names = directory_at(directory).names()
        if INDEX_NAME not in names and SINGLE_NAME not in names:
            others = without_index(names)
            if others:
                return any(_SEVERAL.fullmatch(name) for name in others)
            return any(_SPARE.fullmatch(name) or token_of(name) is not None for name in names)
    return False


def without_index(names: Iterable[str]) -> list[str]:
    """Of the names in a folder, those of the files that are its model as long as no index says which are."""
    found = sorted(name for name in names if name.endswith(SUFFIX) and not _SPARE.fullmatch(name))
    return [SINGLE_NAME] if SINGLE_NAME in found else found


def rules_alone(names: Collection[str], named: AbstractSet[str]) -> bool:
    """Whether the single file in a folder is all of its model, whatever an index there says, which names files: it is
    that of a model before or after this one, unless it counts the single file among others. So transformers has it."""
    return SINGLE_NAME in names and (SINGLE_NAME not in named or named == {SINGLE_NAME})


def holds_export(directory: str) -> bool:
    return any(directory_at(directory).has(name) for name in (INDEX_NAME, SINGLE_NAME))
