"""Finds mistakes in a command's arguments before the command is imported: most import torch, which takes seconds."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence

from .._checkpoint.native.index_checkpoint import IndexCheckpoint
from .._checkpoint.recognize import format_of, recognize
from .._state.key_selection import Selection
from .._storage.open_storage import checkpoint_path
from ..errors import MissingKeysError
from . import output


def check_given(options: Namespace) -> None:
    """Raises ValueError, FileNotFoundError and MissingKeysError, as the command would. What needs requests to an object
    store is left to the command."""
    given = {name: value for name, value in vars(options).items() if value}
    for name in {"rename", "stack"} & given.keys():
        output.pairs(f"--{name.replace('_', '-')}", given[name])
    if hasattr(options, "format") and "dst" in given and "format" not in given and format_of(options.dst) is None:
        raise ValueError(f"{options.dst}: expected --format, as the name says none")
    for folder in _local([*given.get("directories", ()), given.get("directory")]):
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{folder} is no directory")
    sources = _local([given.get(name) for name in ("path", "a", "b", "src")])
    for path in sources:
        if not os.path.exists(path):
            raise FileNotFoundError(f"cannot read {path}: there is no such file or folder")
    if "key" in given or "keys" in given:
        _check_keys(sources[:1] if "rename" in given else sources, given.get("keys"), given.get("key"))


def no_model(missing: Sequence[str]) -> MissingKeysError:
    """The error for an `export` of a model that is not there."""
    hint = "--key says under which name the model is; --key '' takes all that there is"
    return MissingKeysError([*missing], hint=hint)


def _local(given: Sequence[str | None]) -> list[str]:
    return [path for path in (checkpoint_path(each) for each in given if each) if "://" not in path]


def _check_keys(paths: Sequence[str], keys: Sequence[str] | None, key: str | None) -> None:
    """Checks names of native checkpoints, if their indexes list them."""
    listed = [IndexCheckpoint.open(path) if recognize(path) == "dcp" else None for path in paths]
    stored = [name for one in listed if one is not None for name in (*one.tensors, *one.objects)]
    if None not in listed and stored:
        try:
            Selection(keys if key is None else key).check(stored)
        except MissingKeysError as error:
            raise (error if key is None else no_model(error.missing)) from None
