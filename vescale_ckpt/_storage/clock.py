"""Tells the age of files by the clock of their file system, for clean-ups on machines whose clocks differ."""

from __future__ import annotations

import tempfile
import time
from os import fstat

from . import urls


def seconds_since(modified: float, directory: str, enough: float) -> float:
    """Seconds since the time `modified` of a file system's clock; of an age below `enough` by this machine's clock, it
    is only known that it is less. `directory`: where a file may be made for a moment, to learn that clock's time. Not
    in an object store, where this machine's clock is right within minutes: otherwise the store refuses its signatures.

    Files on a shared disk have the time of its server or of the machine that wrote them. A machine whose clock is ahead
    would take the files of a running save for old ones. If no file can be made, this machine's clock is believed.
    """
    here = time.time() - modified
    if here < enough or urls.is_url(directory):
        return here
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return min(here, fstat(file.fileno()).st_mtime - modified)
    except OSError:
        return here
