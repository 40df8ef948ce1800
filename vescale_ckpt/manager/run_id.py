"""The id of a training run, in its local folder and its durable place: no run resumes from the folder of another.

The first save writes a small file `.run` into both. It holds the id, and the paths of both at that time. A folder whose
manager had no durable place has none.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from .._checkpoint.native.step_order import read_record, write_record
from .._storage.open_storage import storage_at
from ..errors import CheckpointError, CorruptCheckpointError

logger = logging.getLogger(__name__)

RUN_NAME = ".run"


class Run(NamedTuple):
    id: str
    durable: str  #: the durable place when the file was written
    local: str

    @staticmethod
    @cache
    def new(durable: str, local: str) -> Run:
        """Returns one id for all managers of a process with the same places: they are one run."""
        return Run(secrets.token_hex(8), durable, local)

    def __str__(self) -> str:
        return f"run {self.id} (local={self.local!r} in front of {self.durable!r})"


def read(root: str) -> Run | None:
    """None if there is no id, or if it is damaged. Raises OSError and `CheckpointError` if it cannot be read."""
    try:
        return Run(**read_record(root, RUN_NAME))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CorruptCheckpointError, TypeError) as error:
        logger.warning("%s does not count: %s", os.path.join(root, RUN_NAME), error)
        return None


def write(root: str, run: Run) -> None:
    """Writes the id durably, if it is not there. Raises OSError, `CheckpointError` and `_C.EngineError`."""
    if read(root) != run:
        storage_at(root).make()
        write_record(root, RUN_NAME, run._asdict())


def choose(new: Run, durable: Run | None, folders: Mapping[int, Run | None]) -> Run:
    """Returns the run that a manager continues, or `new`. Raises `CheckpointError` if a folder is of another run.

    Args:
        durable: the run in the durable place. None: none, or it cannot be read.
        folders: {rank: the run in its folder}, of folders with steps.
    """
    named = {rank: run for rank, run in folders.items() if run is not None}
    if durable is None:
        # A folder that stands where it was made, in front of another place, is of another run.
        here = {run.id for run in named.values() if run.durable == new.durable}
        found = here or {run.id for run in named.values() if run.local != new.local}
    else:
        found = {durable.id}
    of = next(iter(found)) if len(found) == 1 else None
    if foreign := [rank for rank, run in named.items() if run.id != of]:
        one = named[foreign[0]]
        other = durable or next((run for run in named.values() if run.id != one.id), None)
        raise _mixed(new, foreign, str(one), str(other or f"a new run in front of {new.durable!r}"))
    unnamed = [rank for rank, run in folders.items() if run is None]
    if of is None:
        if unnamed:
            logger.warning(
                "%s of ranks %s has steps without an id of their run: they count as this run's", new.local, unnamed
            )
        return new
    if unnamed:
        raise _mixed(new, unnamed, "a run without an id", str(durable or next(iter(named.values()))))
    if moved := next((run for run in named.values() if run.durable != new.durable), None):
        logger.warning(
            "%s counts as that of %s, which was moved. If it was copied, for another job, give that job another "
            "Tier(local=)",
            new.durable,
            moved,
        )
    return new._replace(id=of)


def _mixed(new: Run, ranks: Iterable[int], theirs: str, ours: str) -> CheckpointError:
    return CheckpointError(
        f"local: the folder {new.local} of ranks {[*ranks]} has steps of {theirs}, and this manager saves for {ours}. "
        f"Move that folder away, or give another Tier(local=). To go on with its steps, copy a file {RUN_NAME} so "
        f"that the folder and {new.durable} have the same one",
        path=new.local,
        ranks=[*ranks],
    )
