"""Pauses the cyclic garbage collector while planning and metadata code makes many small objects without cycles.

Such code makes hundreds of thousands of objects. The collector would start again and again and visit all of them each
time, which makes the code up to ten times slower.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """A context, or a decorator, without garbage collection. Nestable. It affects all threads of the process."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
