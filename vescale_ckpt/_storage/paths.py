"""Parses URLs of object stores, and resolves the names of data files in metadata, for storages and checkpoints.

URLs are `s3://bucket/key`, `gs://bucket/key`, `az://container/key` and `memory://key`. A data file lies in the
directory of its checkpoint, or of one beside it.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple

from ..errors import UntrustedCheckpointError

SCHEMES = ("s3", "gs", "az", "memory")
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/]*)")
_IN_SIBLING = re.compile(r"\.\./([^/\0]+)/([^/\0]+\.distcp)")
_URL = re.compile(rf"({'|'.join(SCHEMES)})://(.*)", re.DOTALL)


def is_url(path: str) -> bool:
    """Whether a path is in an object store, and not on a file system."""
    return _URL.match(path) is not None


def split(url: str) -> tuple[str, str]:
    """Returns the root of the store (`s3://bucket`) and the key in it."""
    match = _URL.fullmatch(url)
    assert match is not None, url
    scheme, rest = match[1], match[2]
    if scheme == "memory":  # one store in each process
        return "memory://", rest.strip("/")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.strip("/")


def normal(url: str) -> str:
    """Returns the URL without a slash at its end. Raises ValueError with advice for a URL that names no folder."""
    root, key = split(url)
    if root == "memory://" and not key:
        raise ValueError(f"{url}: names no folder")
    if root != "memory://" and root.endswith("://"):
        raise ValueError(f"{url}: names no bucket")
    for mark in "?#":
        if mark in url:
            raise ValueError(f"{url}: {mark!r} cannot be part of a checkpoint's name in an object store")
    if any(part in ("", ".", "..") for part in key.split("/")) and key:
        raise ValueError(f"{url}: '//', '.' and '..' mean nothing in an object store")
    if not url.isprintable():
        raise ValueError(f"{url!r} is no URL of an object store")
    return joined(root, key)


def check_no_secret(text: str) -> None:
    """Raises ValueError if a URL holds a user's name or a password: they are not used, and would stand in logs and
    errors. The error does not repeat the text."""
    match = _USER.match(text)
    if match is None:
        return
    scheme, authority = match[1].lower(), match[2]
    if "@" in authority or (scheme in SCHEMES[:-1] and ":" in authority):  # a secret may have a slash in it
        raise ValueError(
            f"a URL of {scheme}:// holds a user's name or a password (not repeated here), which is not taken from it: "
            f"write {scheme}://bucket/name, and give credentials by the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY) or by vescale_ckpt.register_store"
        )


def joined(root: str, key: str) -> str:
    return root + key if root.endswith("//") else f"{root}/{key}" if key else root


def check_relative(name: object, key: str) -> str:
    """Returns a data file's name from metadata. Raises `UntrustedCheckpointError` if it leads out of the checkpoint's
    directory, except to a data file of a checkpoint beside it."""
    if not isinstance(name, str) or not name or "\0" in name or not name.isprintable():
        raise UntrustedCheckpointError(f"{key}: metadata gives {name!r} as the name of a data file", key=key)
    path = PurePosixPath(name)
    if (path.is_absolute() or ".." in path.parts) and in_sibling(name) is None:
        raise UntrustedCheckpointError(
            f"{key}: metadata places it in {name!r}, outside of the checkpoint's directory", key=key
        )
    return name


class InSibling(NamedTuple):
    """A file of another checkpoint in the same directory above."""

    folder: str
    file: str

    @property
    def name(self) -> str:
        """Its name in the metadata of a checkpoint beside `folder`."""
        return f"../{self.folder}/{self.file}"


def in_sibling(name: str) -> InSibling | None:
    """Returns the folder and file of a name `../folder/file.distcp`. None for every other name."""
    match = _IN_SIBLING.fullmatch(name)
    return None if match is None or match[1] in (os.curdir, os.pardir) else InSibling(match[1], match[2])


def data_path(root: str, name: str) -> str:
    """Returns the path of a data file. `name`: from the metadata in `root`, checked by `check_relative`.

    The operating system resolves `..`. If `root` is a link, `..` is the directory above its target, as for stock DCP.
    An object store has no `..`, so it is resolved here.
    """
    if is_url(root) and (place := in_sibling(name)) is not None:
        return os.path.join(folder_above(root)[0], *place)
    return os.path.join(root, name)


def folder_above(directory: str) -> tuple[str, str]:
    """Returns the directory above a checkpoint and the checkpoint's name in it. Follows links."""
    if is_url(directory):
        above, _, name = directory.rstrip("/").rpartition("/")
        return above, name
    above, name = os.path.split(os.path.realpath(directory))
    return above, name
