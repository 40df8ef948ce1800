"""numpy is not required: only its own formats need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError


@contextmanager
def numpy_needed() -> Iterator[None]:
    """Around the import of a module that imports numpy. Raises `CheckpointError` where numpy is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise CheckpointError(
            "the formats .npz and .npy need numpy, which is not installed: pip install numpy"
        ) from None
