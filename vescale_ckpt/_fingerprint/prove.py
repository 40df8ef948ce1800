"""Proves that a state is what a checkpoint holds, after every hook of the framework has run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from .. import settings
from .._checkpoint.record_reader import ReadOptions
from .._collective.load import CollectiveLoad
from .._engine.torch_types import local_of
from .._engine.wrapper_tensors import inner_pairs, is_wrapper, map_inner
from .._load.source import Source
from .._ranks.exchange import Exchange, calling
from .._state.key_selection import Selection
from ..errors import CheckpointError, CheckpointTimeoutError, StateDiffersError, some
from .collect import fingerprint, flat_values
from .fingerprint import FILE, OTHER_VALUES, Fingerprint, not_comparable
from .object_digest import differing_elements

logger = logging.getLogger(__name__)

NOT_KEPT = "it was saved without fingerprint=True"
_MOST_LOCATED = 8  # tensors that are compared element by element


@dataclass(frozen=True)
class Proof:
    """What `prove` found; equal on all ranks. It is true if nothing differs. Keys are those of the checkpoint."""

    fingerprint: Fingerprint  #: of the state
    equal: int  #: number of keys whose values are equal
    different: Mapping[str, str]  #: {key: what differs}
    missing: tuple[str, ...]  #: keys of the checkpoint that the state does not have
    unexpected: tuple[str, ...]  #: keys of the state that the checkpoint does not have
    replicas: Mapping[str, tuple[int, int]]  #: {key: two ranks that hold different values}
    not_compared: tuple[str, ...] = ()  #: keys of `PerRank` values, if another number of ranks has saved them

    def __bool__(self) -> bool:
        return not (self.different or self.missing or self.unexpected or self.replicas)

    def __str__(self) -> str:
        named = {
            "different": [f"{key} ({what})" for key, what in self.different.items()],
            "not in the state": self.missing,
            "not in the checkpoint": self.unexpected,
            "different from rank to rank": [f"{key} (ranks {a} and {b})" for key, (a, b) in self.replicas.items()],
            "of another number of ranks, not compared": self.not_compared,
        }
        texts = [f"{len(keys)} {what}: {some(keys)}" for what, keys in named.items() if keys]
        return "; ".join([f"{self.equal} keys are equal (fingerprint {self.fingerprint})", *texts])


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

    The checkpoint must have been saved with `fingerprint=True`. Its data are read only for the first tensors that
    differ, to say how many elements on which ranks.

    Args:
        path: a path, or the URL of an object store.
        state: what was loaded, in the form in which it would be saved.
        strict: True raises `StateDiffersError` unless everything is equal; False only returns what was found.
        process_group: None: all ranks, or this process alone where torch.distributed is not initialised.
        timeout: seconds to wait for other ranks at each step; None: `VESCALE_CKPT_TIMEOUT`.

    Raises on all ranks if any fails: `StateDiffersError`, with `different`, `missing`, `unexpected` and `replicas`;
    `CheckpointError` if the checkpoint has no fingerprint; what `fingerprint` and `load` raise.
    """
    with calling("prove", process_group):
        if (stored := stored_fingerprint(path, process_group, timeout)) is None:
            raise CheckpointError(f"{os.fspath(path)} has no fingerprint to compare with: {NOT_KEPT}", path=path)
        return _prove_against(stored, path, state, strict, process_group, timeout)


def prove_restored(
    stored: Fingerprint | None,
    path: str,
    state: Mapping[str, Any],
    options: Mapping[str, Any],
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    *,
    locates: bool = True,
) -> None:
    """Proves what a load into `state` has restored, and logs one line on the coordinator. What the checkpoint has under
    names that no rank's state has does not count. All ranks call it together.

    Args:
        stored: the fingerprint in the checkpoint; without one, the line is a warning.
        options: those of the load. `strict=False` only warns of differences. With `keys` and `rename`, nothing is
            compared, which the line says.
        locates: whether all ranks can load tensors that differ from `path`.

    Raises what `prove` raises.
    """
    exchange, strict = Exchange.of(process_group, settings.timeout(timeout)), options.get("strict", True)
    in_part = options.get("keys") is not None or options.get("rename") is not None
    level, reason = logging.WARNING, "it was loaded in part, or under other names" if in_part else NOT_KEPT
    text = f"not proved: {reason}"
    if stored is not None and not in_part:
        of_ranks = exchange.share(json.dumps([*map(str, state)]).encode(), "proving what was restored")
        stored = stored.under(name for names in of_ranks for name in json.loads(names))
        proof = _prove_against(stored, path, state, strict, process_group, timeout, locates)
        level = logging.INFO if proof else logging.WARNING
        text = f"what was restored {'is' if proof else 'is not'} what was saved: {proof}"
    if exchange.is_coordinator:
        logger.log(level, "%s: %s", path, text)


def _prove_against(
    stored: Fingerprint,
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    strict: bool,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
    locates: bool = True,
) -> Proof:
    proof = _compare(stored, fingerprint(state, process_group=process_group, timeout=timeout))
    if unequal := [key for key, what in proof.different.items() if locates and what == OTHER_VALUES]:
        located = _locate(path, state, unequal[:_MOST_LOCATED], process_group, timeout)
        proof = replace(proof, different={**proof.different, **located})
    if strict and not proof:
        found = {"different": dict(proof.different), "replicas": dict(proof.replicas)}
        text = f"{os.fspath(path)}: the state is not what was saved. {proof}"
        raise StateDiffersError(text, missing=[*proof.missing], unexpected=[*proof.unexpected], **found)
    return proof


def stored_fingerprint(
    path: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None, timeout: float | None = None
) -> Fingerprint | None:
    """Reads the fingerprint of a checkpoint, with all ranks. None if it has none."""
    files: dict[str, bytes] = {}
    _load(path, {}, None, process_group, timeout, files)
    return Fingerprint.from_bytes(files.get(FILE, b""), os.fspath(path))


def _load(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    keys: Iterable[str] | None,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
    files: dict[str, bytes] | None = None,
) -> None:
    source = Source(os.fspath(path), ReadOptions(), None)
    CollectiveLoad(source, Selection(keys), False, False, process_group, timeout, files).into(state, None)


def _compare(stored: Fingerprint, live: Fingerprint) -> Proof:
    apart = not_comparable(stored, live)
    there, here = stored.keys() - apart, live.keys() - apart
    both = there & here
    different = {key: what for key, what in (stored - live).items() if key in both}
    equal = len(both) - len(different)
    missing, unexpected, others = (tuple(sorted(keys)) for keys in (there - here, here - there, apart))
    return Proof(live, equal, different, missing, unexpected, live.replicas, others)


def _locate(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    keys: Iterable[str],
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
) -> dict[str, str]:
    """{key: how many elements differ, on which ranks}. Loads one tensor at a time, beside the state's."""
    exchange = Exchange.of(process_group, settings.timeout(timeout))
    values = flat_values(state, exchange)
    found = {}
    for key in keys:
        held = values.get(key)
        target = {key: _empty_like(held)} if isinstance(held, torch.Tensor) else {}
        try:
            _load(path, target, [key], process_group, timeout)
        except CheckpointTimeoutError:
            raise
        except CheckpointError as error:  # on all ranks; that the key differs is known without it
            found[key] = f"other values or settings, which no load compares: {error}"
            continue
        here = _count_different(held, target[key]) if target else (0, 0)
        of_ranks = map(json.loads, exchange.share(json.dumps(here).encode(), f"comparing {key}"))
        parts = [f"rank {rank}: {count:,} of {of:,} elements" for rank, (count, of) in enumerate(of_ranks) if count]
        found[key] = some(parts, 4) if parts else "other values in memory than a load gives"
    return found


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return map_inner(tensor, torch.empty_like) if is_wrapper(tensor) else torch.empty_like(tensor)


def _count_different(held: Any, loaded: Any) -> tuple[int, int]:
    """How many elements differ, of how many; of wrappers those of the inner tensors."""
    one, other = local_of(held), local_of(loaded)
    pairs = [(a, b) for _, a, b in inner_pairs(one, other)] if is_wrapper(one) else [(one, other)]
    with torch.no_grad():
        different = [differing_elements(a, b) for a, b in pairs]
    return sum(int(of_pair.sum()) for of_pair in different), sum(of_pair.numel() for of_pair in different)
