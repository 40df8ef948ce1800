"""Compares samples of tensors, for changes of which nothing tells: they raise no version counter."""

from __future__ import annotations

from typing import Any

from .._engine import _C

_ELEMENTS = 4  # of each tensor


def samples_of(table: Any, devices: Any = b"") -> memoryview:
    """A number for each row of a table of tensors to write or to copy, which differs if some of its elements do.
    `devices`: as `copy_table` gives them. 0 for tensors on a device: to read them would wait for it."""
    return memoryview(_C.sample_hashes(table, devices, _ELEMENTS)).cast("Q")
