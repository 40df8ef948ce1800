"""Defines the file names of DCP's layout for all modules that write, read or remove such files."""

from __future__ import annotations

import os
import re

from ..._engine import _C
from ..._storage.storage import MARKER_PREFIX

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"  #: that of stock DCP
INDEX_NAME = METADATA_NAME + ".index"
NODE_MARKER = ".node"  #: in a folder that has one node's part of a checkpoint: other nodes may have the other files
METRICS_NAME = "metrics.json"  #: a manager writes it
_OF_DATA = r"__\d+_[0-9a-f]{8}(_\d+)?" + re.escape(DATA_SUFFIX)
_OUR_DATA_FILE = re.compile(_OF_DATA)
_PART = re.compile(r"(?<=_[0-9a-f]{8})_\d+" + re.escape(DATA_SUFFIX))
_METADATA_FILE = re.compile(r"(__\d+)?" + re.escape(METADATA_NAME))
_TEMPORARY_DATA = re.compile(_OF_DATA + r"\.tmp\.\d+\.\d+")
_TEMPORARY_FILE = re.compile(r"(__\d+)?" + re.escape(METADATA_NAME) + r"(\.index)?\.tmp.*")
_OF_PROCESS = re.compile(r"\.tmp\.(\d+)\.\d+\.([0-9a-f]{8})")  # csrc/io/commit.h


def metadata_name(rank: int | None) -> str:
    """Returns `.metadata`; with a rank, the name of that rank's metadata file in a save without collectives."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def index_name(rank: int | None) -> str:
    """The name of the index beside `metadata_name(rank)`."""
    return metadata_name(rank) + ".index"


def is_metadata_file(name: str) -> bool:
    return _METADATA_FILE.fullmatch(name) is not None


def rank_of_metadata(name: str) -> int | None:
    """The rank for which `metadata_name` returns `name`."""
    return None if name == METADATA_NAME else int(name[2 : -len(METADATA_NAME)])


def data_name(rank: int, token: str, part: int | None = None) -> str:
    """The name of a rank's data file. `part`: its number if the rank has several, from 0."""
    middle = f"_{part}" if part else ""
    return f"__{rank}_{token}{middle}{DATA_SUFFIX}"


def first_part(name: str) -> str:
    """Returns the data file that a save locks: the first one if a rank has several, otherwise `name` itself."""
    return _PART.sub(DATA_SUFFIX, name)


def is_data_file(name: str) -> bool:
    """Whether this package gives such names to data files."""
    return _OUR_DATA_FILE.fullmatch(name) is not None


def is_temporary_file(name: str) -> bool:
    """Whether the name is that of unfinished metadata, of an unfinished index, of a marker file, or of a data file that
    another rank sends."""
    return _TEMPORARY_FILE.fullmatch(name) is not None or is_temporary_data_file(name)


def is_temporary_data_file(name: str) -> bool:
    """Whether the name is that of a data file that another rank sends: the rank that gets it keeps it locked."""
    return _TEMPORARY_DATA.fullmatch(name) is not None


def may_be_in_use(temporary: str) -> bool:
    """Whether a temporary file may still be needed: it is a marker file, or the process that writes it may be about to
    rename it. A process on another machine or in another container cannot be seen from here: then only the file's age
    shows that it has died."""
    match = _OF_PROCESS.search(temporary)
    if temporary.startswith(MARKER_PREFIX) or match is None or match[2] != _C.process_space():
        return True
    return int(match[1]) != os.getpid() and os.path.exists(f"/proc/{match[1]}")


def is_of_a_save(name: str) -> bool:
    """Whether a save that died may have left a file of that name."""
    return is_data_file(name) or is_temporary_file(name) or name in (INDEX_NAME, NODE_MARKER)
