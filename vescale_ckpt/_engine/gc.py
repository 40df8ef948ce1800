"""Pausing the cyclic garbage collector while many small, acyclic objects are made.

Plans, results and metadata are hundreds of thousands of little objects, none of them in a cycle. Making them wakes the
collector again and again, and each time it walks all that were made before: a factor of up to ten.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Nestable; the collector is left as it was found. Other threads share the pause, which is harmless."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
