"""`Fingerprint` is what a state is, in 128 bits a tensor, however ranks share it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .._engine import _C
from ..errors import CheckpointError, CorruptCheckpointError, some
from ..reports import EXTRA_FILES

if TYPE_CHECKING:
    from .._checkpoint.checkpoint import Checkpoint

FILE = "fingerprint.json"  #: the extra file of a checkpoint that holds its fingerprint
KEY = EXTRA_FILES + FILE  #: its key among the checkpoint's objects
OTHER_VALUES = "other values"  #: what differs in tensors of one dtype and shape
_OF_RANK = re.compile(r"(.+)\.rank_\d+_of_(\d+)", re.DOTALL)  # a key of `PerRank`: name, and number of ranks
_DIGITS = re.compile("[0-9a-f]{32}")
_BEGIN = re.compile(rb'\{"fingerprint":\d+,"tensors":')  # of the text, in every version
_VERSION = 1  # of the text, and of how values are computed
_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size of a chunk in its tensor


class TensorValue(NamedTuple):
    """A tensor: its dtype, its global shape, and the polynomial of its bytes (csrc/fingerprint/fingerprint.h)."""

    dtype: str
    shape: tuple[int, ...]
    value: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Fingerprint:
    """What a state holds. Equal states have equal fingerprints, whatever the world size, the sharding, the replication
    and the devices. Two states that differ have different ones, except with a probability of at most 2^-90 for a tensor
    of 600 GB.

    `str()` is 32 hexadecimal digits for log lines. `a - b` is {key: what differs} of all keys that differ; of two that
    this process has taken, it names the chunks of this rank that do.
    """

    tensors: Mapping[str, TensorValue]
    objects: Mapping[str, str]  #: hexadecimal digests
    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """{key: two ranks} of tensors and objects whose replicas differ; the value is that of the first rank."""
    inventory: bytes = field(default=b"", compare=False, repr=False)
    """Of what this rank holds (csrc/state/inventory.h); empty if the fingerprint is from a file."""
    values: bytes = field(default=b"", compare=False, repr=False)  #: 16 bytes of each item of the inventory

    def __str__(self) -> str:
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    @cached_property
    def _chunks(self) -> Mapping[str, dict[_Box, bytes]]:
        """The values of the chunks that this rank holds of each key."""
        found: dict[str, dict[_Box, bytes]] = {}
        items = _C.inventory_items(self.inventory) if self.inventory else []
        for item, (key, *_, offset, size) in enumerate(items):
            found.setdefault(key, {})[offset, size] = self.values[16 * item : 16 * (item + 1)]
        return found

    def keys(self) -> set[str]:
        return {*self.tensors, *self.objects}

    def under(self, names: Iterable[str]) -> Fingerprint:
        """Returns what it holds of a state's entries of these names."""
        begins = tuple(f"{name}." for name in names)
        kept = {key for key in self.keys() if f"{key}.".startswith(begins)}
        tensors = {key: of for key, of in self.tensors.items() if key in kept}
        return Fingerprint(tensors, {key: of for key, of in self.objects.items() if key in kept})

    def __sub__(self, other: Fingerprint) -> dict[str, str]:
        keys = sorted(self.keys() | other.keys())
        return {key: what for key in keys if (what := self._difference(other, key))}

    def _difference(self, other: Fingerprint, key: str) -> str:
        here, there = self._value(key), other._value(key)
        if here == there:
            return ""
        if here is None or there is None:
            return "only in the first" if there is None else "only in the second"
        if isinstance(here, str) or isinstance(there, str):
            return "another object" if type(here) is type(there) else "a tensor in one, an object in the other"
        if here[:2] != there[:2]:
            return f"{here} in the first, {there} in the second"
        mine, others = self._chunks.get(key, {}), other._chunks.get(key, {})
        if not mine or mine.keys() != others.keys():
            return OTHER_VALUES
        differing = [
            f"{list(size)} at {list(offset)}" for (offset, size), value in mine.items() if value != others[offset, size]
        ]
        return f"{OTHER_VALUES} (here: {', '.join(differing)})" if differing else OTHER_VALUES

    def _value(self, key: str) -> TensorValue | str | None:
        return self.tensors.get(key) or self.objects.get(key)

    # --- As a file

    def to_bytes(self) -> bytes:
        tensors = {key: (of.dtype, of.shape, f"{of.value:032x}") for key, of in sorted(self.tensors.items())}
        content = {"fingerprint": _VERSION, "tensors": tensors, "objects": dict(sorted(self.objects.items()))}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: str) -> Fingerprint | None:
        """Returns None for a user's own file of that name. Raises `CorruptCheckpointError` for another fingerprint than
        `to_bytes` makes."""
        if not is_fingerprint(content):
            return None
        try:
            found = json.loads(content)
            if found["fingerprint"] != _VERSION:
                raise ValueError(f"version {found['fingerprint']!r}")
            tensors = {key: _tensor_value(*of) for key, of in found["tensors"].items()}
            objects = {key: _of_digits(of).hex() for key, of in found["objects"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{path}: its fingerprint is not readable: {error}", key=None, file=path
            ) from None
        return cls(tensors, objects)


def with_fingerprint(files: Mapping[str, bytes] | None, taken: Fingerprint) -> Mapping[str, bytes]:
    """Returns the extra files of a save with the fingerprint among them. Reads none: if the contents of `files` raise,
    the save raises on all ranks. Raises ValueError if a file has the fingerprint's name."""
    given: Any = {} if files is None else files
    if FILE in given:
        raise ValueError(f"extra_files: {FILE!r} is the file of fingerprint=True")
    return ChainMap({FILE: taken.to_bytes()}, given)


def remove_fingerprint(files: dict[str, bytes]) -> bytes:
    """Removes the fingerprint from the extra files that a load has read, and returns it; empty if there is none. A
    user's own file of that name stays."""
    return files.pop(FILE) if is_fingerprint(files.get(FILE, b"")) else b""


def is_fingerprint(content: bytes) -> bool:
    """Whether a file named `FILE` is a fingerprint, and not a user's own."""
    return _BEGIN.match(content) is not None


def has_fingerprint(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a fingerprint, which may be damaged, and not a user's own file of that name."""
    with suppress(CheckpointError, OSError):
        content = checkpoint.load_objects([KEY])[KEY] if KEY in checkpoint.objects else b""
        return type(content) is bytes and is_fingerprint(content)
    return True


def not_comparable(a: Fingerprint, b: Fingerprint) -> set[str]:
    """Returns the keys of each `PerRank` whose number of ranks differs: no key of one side has a counterpart."""
    matches = [[match for match in map(_OF_RANK.fullmatch, of.keys()) if match] for of in (a, b)]
    sizes = [{match.groups() for match in found} for found in matches]
    in_both = {name for name, _ in sizes[0]} & {name for name, _ in sizes[1]}
    apart = in_both - {name for name, _ in sizes[0] & sizes[1]}
    return {match[0] for found in matches for match in found if match[1] in apart}


def stale_copy(before: tuple[int, Fingerprint], step: int, taken: Fingerprint) -> str | None:
    """Returns a warning if all trained tensors of a save equal those of the save before (its step and fingerprint),
    although the step has gone on: a copy may be saved again and again. None otherwise."""
    trained, others = ({key: of for key, of in save.tensors.items() if _is_trained(of)} for save in (taken, before[1]))
    if before[0] >= step or not trained or trained != others:
        return None
    return (
        f"step {step} has the same tensors as step {before[0]}, bit for bit: all {len(trained):,} parameters, "
        f"moments and buffers of floating point ({some(sorted(trained), 3)}). Either the optimizer made no step in "
        "between, or what is saved is a stale copy. Counters, random states and objects are not compared"
    )


def _is_trained(of: TensorValue) -> bool:
    """Whether training changes a tensor. Random states are integers, and counters, such as Adam's `step`, one number:
    they go on beside a stale copy."""
    return of.dtype.startswith(("float", "bfloat", "complex")) and prod(of.shape) > 1


def _tensor_value(dtype: str, shape: list[int], value: str) -> TensorValue:
    return TensorValue(str(dtype), tuple(map(int, shape)), int.from_bytes(_of_digits(value), "big"))


def _of_digits(digits: str) -> bytes:
    if _DIGITS.fullmatch(digits) is None:
        raise ValueError(f"{digits!r:.40} are not 32 hexadecimal digits")
    return bytes.fromhex(digits)
