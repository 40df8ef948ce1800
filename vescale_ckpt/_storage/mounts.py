"""Tells for which files a lock (`flock`) keeps out the processes of other machines, too."""

from __future__ import annotations

import functools
import os
import stat

_LOCAL_LOCKS = frozenset(
    {"fuse", "fuseblk", "9p", "virtiofs", "beegfs", "gpfs", "vboxsf", "afs", "orangefs", "pvfs2", "cifs", "smb3"}
)
#: Those whose daemon asks a server for locks.
_FUSE_WITH_LOCKS = frozenset({"fuse.juicefs", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs"})
_MOUNTS = "/proc/self/mountinfo"


def locks_reach_others(status: os.stat_result) -> bool:
    """Whether a lock on this file or folder is seen by every machine that has mounted its file system.

    File systems of one machine count as such. What is not known counts as one.
    """
    kind, options = _mount_of(status.st_dev)
    if kind in ("nfs", "nfs4"):
        # Locks of files are the server's. Those of folders stay with the client.
        told = {"nolock", "local_lock=all", "local_lock=flock"}.isdisjoint(options)
        return told and stat.S_ISREG(status.st_mode)
    if kind == "lustre":
        return "flock" in options
    if kind.startswith("fuse."):
        return kind in _FUSE_WITH_LOCKS
    return kind not in _LOCAL_LOCKS


@functools.lru_cache(maxsize=256)
def _mount_of(device: int) -> tuple[str, frozenset[str]]:
    """Type and options of the mounted file system with this device number."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split(" ", 3)[2] == wanted:
                    kind, _, options = after.rstrip("\n").split(" ", 2)
                    return kind, frozenset(options.split(","))
    except (OSError, ValueError, IndexError):
        pass
    return "", frozenset()
