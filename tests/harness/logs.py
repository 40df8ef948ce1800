"""What the package logs, on a rank or in a process that pytest does not listen to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """A context in which texts of this level and above are noted. One within another takes nothing from it."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vescale_ckpt")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, before or level))
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
