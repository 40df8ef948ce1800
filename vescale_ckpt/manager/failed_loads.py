"""Remembers which checkpoints a manager could not load, and finds out which of them are damaged."""

from __future__ import annotations

import logging

from .._native.steps import complete_steps, path_of
from .clean_up import is_damaged

logger = logging.getLogger(__name__)


class FailedLoads:
    """The checkpoints that `restore` could not load. Sets are replaced, not changed: a thread may be reading them."""

    def __init__(self) -> None:
        self._paths: frozenset[str] = frozenset()
        self.seem_damaged: frozenset[str] = frozenset()  #: paths of those that the load called damaged
        self._are_damaged: frozenset[str] = frozenset()  # those of these that a whole verification finds damaged, too

    def add(self, path: str, *, seems_damaged: bool) -> None:
        self._paths |= {path}
        if seems_damaged:
            self.seem_damaged |= {path}

    def forget(self, path: str) -> None:
        """For a checkpoint that was loaded or saved again."""
        self._paths -= {path}
        self.seem_damaged -= {path}
        self._are_damaged -= {path}

    def judged(self, root: str) -> tuple[set[int], set[int]]:
        """The steps below a root that are damaged, and those that could not be loaded for another reason: a load may
        fail for its targets. Verifies all data of those that seem damaged, once."""
        damaged, others = set[int](), set[int]()
        for step in complete_steps(root):
            path = path_of(root, step)
            if path in self.seem_damaged - self._are_damaged:
                if is_damaged(path):
                    self._are_damaged |= {path}
                else:
                    self.seem_damaged -= {path}
                    logger.warning("%s could not be loaded, but a verification finds no damage: it stays", path)
            if path in self._paths:
                (damaged if path in self._are_damaged else others).add(step)
        return damaged, others
