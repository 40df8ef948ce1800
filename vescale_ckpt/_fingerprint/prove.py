"""Proves that a state is what a checkpoint holds, after every hook of the framework has run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .._collective.start_load import start_load
from .._checkpoint.record_reader import ReadOptions
from .._load.source import Source
from .._state.key_selection import Selection
from ..errors import CheckpointError, StateDiffersError, some
from .collect import fingerprint
from .fingerprint import Difference, Fingerprint

FILE = "vescale_ckpt.fingerprint.json"  #: the extra file of a checkpoint that holds its fingerprint


@dataclass(frozen=True)
class Proof:
    """What `prove` found. Keys are those of the checkpoint, with dots."""

    fingerprint: Fingerprint  #: of the state
    equal: int  #: number of keys
    different: Mapping[str, str]  #: {key: what differs}
    missing: tuple[str, ...]  #: keys of the checkpoint that the state does not have
    unexpected: tuple[str, ...]  #: keys of the state that the checkpoint does not have
    replicas: Mapping[str, tuple[int, int]]  #: {key: two ranks that hold different values}

    def __bool__(self) -> bool:
        return not (self.different or self.missing or self.unexpected or self.replicas)

    def __str__(self) -> str:
        if self:
            return f"{self.equal} keys equal the checkpoint, fingerprint {self.fingerprint}"
        parts = [
            f"differ: {some([f'{key} ({what})' for key, what in self.different.items()])}" if self.different else "",
            f"missing from the state: {some(self.missing)}" if self.missing else "",
            f"not in the checkpoint: {some(self.unexpected)}" if self.unexpected else "",
            f"differ between replicas: {some([f'{key} (ranks {a} and {b})' for key, (a, b) in self.replicas.items()])}"
            if self.replicas
            else "",
        ]
        return f"{self.equal} keys equal the checkpoint; " + "; ".join(filter(None, parts))


def prove(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Proof:
    """Compares `state` with the fingerprint in the checkpoint at `path`; all ranks of the group call it together, after
    the load and every hook of the framework, before the first step.

    No tensor of the checkpoint is read. The checkpoint must have been saved with `fingerprint=True`.

    Args:
        strict: raise `StateDiffersError` on all ranks unless everything is equal; False: only return what was found.

    Raises on all ranks: `CheckpointError` if the checkpoint has no fingerprint, and what `fingerprint` raises.
    """
    stored = stored_fingerprint(path, process_group, timeout)
    live = fingerprint(state, process_group=process_group, timeout=timeout)
    proof = compare(stored, live)
    if strict and not proof:
        raise StateDiffersError(f"{os.fspath(path)}: the state is not what was saved. {proof}", proof)
    return proof


def stored_fingerprint(
    path: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None, timeout: float | None = None
) -> Fingerprint:
    """Reads the fingerprint of a checkpoint, with all ranks. Raises `CheckpointError` if it has none."""
    files: dict[str, bytes] = {}
    source = Source(os.fspath(path), ReadOptions(), None)
    with start_load(source, Selection(None), False, False, process_group, timeout, files) as loading:
        loading.into({}, None)
    if FILE not in files:
        raise CheckpointError(f"{os.fspath(path)}: it has no fingerprint: it was saved without fingerprint=True")
    return Fingerprint.from_bytes(files[FILE], os.fspath(path))


def compare(stored: Fingerprint, live: Fingerprint) -> Proof:
    keys, here = {*stored.tensors, *stored.objects}, {*live.tensors, *live.objects}
    found: Mapping[str, Difference] = stored - live
    different = {key: str(of) for key, of in found.items() if key in keys and key in here}
    return Proof(
        live,
        len(keys & here) - len(different),
        different,
        tuple(sorted(keys - here)),
        tuple(sorted(here - keys)),
        live.replicas,
    )
