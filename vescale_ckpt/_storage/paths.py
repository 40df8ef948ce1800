"""Parses URLs of object stores, and checks the names of data files in metadata, for storages and checkpoints.

URLs are `s3://bucket/key`, `gs://bucket/key`, `az://container/key` and `memory://key`. A data file lies in the
directory of its checkpoint, or below it.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from ..errors import UntrustedCheckpointError

SCHEMES = ("s3", "gs", "az", "memory")
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/]*)")
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
    directory."""
    if not isinstance(name, str) or not name or "\0" in name or not name.isprintable():
        raise UntrustedCheckpointError(f"{key}: metadata gives {name!r} as the name of a data file", key=key)
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UntrustedCheckpointError(
            f"{key}: metadata places it in {name!r}, outside of the checkpoint's directory", key=key
        )
    return name
