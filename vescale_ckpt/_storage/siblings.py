"""Resolves the names that metadata gives to data files: of the checkpoint's own directory, or of one beside it."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from . import urls

_IN_SIBLING = re.compile(r"\.\./([^/\0]+)/([^/\0]+\.distcp)")


class InSibling(NamedTuple):
    """A file of another checkpoint in the same directory above."""

    folder: str
    file: str

    @property
    def name(self) -> str:
        """Its name in the metadata of a checkpoint beside `folder`."""
        return f"../{self.folder}/{self.file}"


def in_sibling(name: str) -> InSibling | None:
    """What a name of the form `../folder/file.distcp` stands for. None for every other name."""
    match = _IN_SIBLING.fullmatch(name)
    return None if match is None or match[1] in (os.curdir, os.pardir) else InSibling(match[1], match[2])


def data_path(root: str, name: str) -> str:
    """The path of a data file, whose name metadata in `root` gives and `check_relative` has checked.

    The system resolves `..`: of a link to a checkpoint the directory above the link's target counts, as for stock DCP.
    In an object store there is no `..`.
    """
    if urls.is_url(root) and (place := in_sibling(name)) is not None:
        return os.path.join(folder_above(root)[0], *place)
    return os.path.join(root, name)


def folder_above(directory: str) -> tuple[str, str]:
    """The directory above a checkpoint, and the checkpoint's name in it. Links are followed."""
    if urls.is_url(directory):
        above, _, name = directory.rstrip("/").rpartition("/")
        return above, name
    above, name = os.path.split(os.path.realpath(directory))
    return above, name
