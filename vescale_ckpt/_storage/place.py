"""Marks by which ranks see whether they use one directory."""

from __future__ import annotations

import os

#: Of the names of such marks. They count as temporary files of a checkpoint's metadata, so that clean-ups find them.
PLACE_PREFIX = ".metadata.tmp.place."


def leave(directory: str, name: str) -> None:
    """Makes an empty file that was not there. Not durable. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    os.close(os.open(os.path.join(directory, name), flags, 0o666))


def is_seen(directory: str, name: str) -> bool:
    """Whether the directory has the file, as its server says."""
    # Opened for each look: what a network file system keeps of a directory, it then compares with its server.
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.stat(name, dir_fd=descriptor)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
