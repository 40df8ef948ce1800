"""Names of the files of a model in Hugging Face's layout, and what a folder with such files is."""

from __future__ import annotations

import contextlib
import os
import re

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# What torch's HuggingFaceStorageWriter has among the texts of a header: `{name: {SHARDING_OFFSETS: [...]}}` as JSON, of
# each tensor in the file that is a box of a larger one, where it begins.
SHARDING_INFO = "DCP_SHARDING_INFO"
SHARDING_OFFSETS = "saved_offsets"

_MODEL_FILE = re.compile(r"(shard-\d{5,}-)?model(-\d{5,}-of-\d{5,})?\.safetensors")
_SEVERAL = re.compile(r"model-\d{5,}-of-(?!0+1\.)\d{5,}\.safetensors")
_TEMPORARY = re.compile(_MODEL_FILE.pattern + r"\.tmp\.([0-9a-f]{8})")
_TEMPORARY_INDEX = re.compile(re.escape(INDEX_NAME) + r"\.tmp\.\d+\.\d+")


def file_names(count: int) -> list[str]:
    """Of `count` files that together are one model."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


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
    """Whether there are files of an export, and none of those that make it one: it was ended while it wrote."""
    with contextlib.suppress(OSError):
        names = os.listdir(directory)
        if INDEX_NAME not in names and SINGLE_NAME not in names:
            return any(_SEVERAL.fullmatch(name) or token_of(name) is not None for name in names)
    return False


def without_unfinished(names: list[str]) -> list[str]:
    """Of the files of a folder without an index, those that are a model: beside one that is whole in a single file,
    files of several are an export over it that did not finish."""
    return [name for name in names if not _SEVERAL.fullmatch(name)] if SINGLE_NAME in names else names


def holds_export(directory: str) -> bool:
    return any(os.path.lexists(os.path.join(directory, name)) for name in (INDEX_NAME, SINGLE_NAME))
