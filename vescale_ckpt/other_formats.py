"""What is no checkpoint to load, but a conversion can make one of: what to say to who tries."""

from __future__ import annotations

import contextlib
import os

_ZIP, _PICKLE = b"PK\3\4", b"\x80"
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy")


def advice_for_file(path: str) -> str | None:
    """What to do with a file of torch.save or numpy; None if it is something else. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        magic = file.read(len(_ZIP))
    if magic == _ZIP:
        return f"{path} is a file of torch.save or numpy, which is no checkpoint to load: {_convert(path)}"
    if magic[:1] == _PICKLE and magic[1:2] <= b"\5":
        return f"{path} is a file of torch.save before torch 1.6: load it with torch.load and save it again"
    return None


def advice_for_directory(path: str) -> str | None:
    """What to do with such files in a directory that holds no checkpoint; None if there are none."""
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES))
        if names:
            found = path if names[0].endswith(".npy") else os.path.join(path, names[0])
            more = f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
            return f"it holds {names[0]}{more}, of another format: {_convert(found)}"
    return None


def _convert(path: str) -> str:
    return f"vescale_ckpt.convert({path!r}, 'model.safetensors', format='safetensors') makes one that can be loaded"
