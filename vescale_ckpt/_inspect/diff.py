"""Compares two checkpoints of any format: keys, shapes, dtypes, and the checksums of values; or values or bits.

Values are equal if they are the same numbers: -0.0 is 0.0, and NaN is NaN whatever its bits. The real and the imaginary
part of a complex number count separately. Bits are equal if nothing differs at all.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._checkpoint.checkpoint import Checkpoint, Chunk, Read, cut
from .._checkpoint.open_checkpoint import open_checkpoint
from .._engine.overlap import groups_of
from .._fingerprint.fingerprint import KEY as FINGERPRINT_KEY
from .._fingerprint.fingerprint import has_fingerprint
from .._fingerprint.object_digest import differing_elements
from .._state.key_selection import Rename, Selection, rename_function, rename_keys
from .._storage.open_storage import checkpoint_path
from ..errors import UntrustedCheckpointError

_GROUP_BYTES = 64 << 20  # of values that are read from each checkpoint at a time


@dataclass
class ValueDifference:
    """How the values of one tensor differ, or their bits."""

    key: str
    elements: int = 0
    different: int = 0  #: elements
    max_abs: float = 0.0  #: largest absolute difference of finite values
    max_rel: float = 0.0  #: the same, divided by the larger magnitude of the two values
    not_finite_a: int = 0  #: NaN and infinite values
    not_finite_b: int = 0
    unknown: bool = False  #: torch cannot tell the values of the dtype: only bytes were compared

    @property
    def equal(self) -> bool:
        return self.different == 0


@dataclass
class Diff:
    """The result of `diff`."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)  #: kind, dtype or shape differs: in a and in b
    objects: list[str] = field(default_factory=list)  #: objects of another value, or that cannot be compared
    values: list[ValueDifference] = field(default_factory=list)  #: one for each tensor whose values differ
    checksums: list[str] = field(default_factory=list)  #: tensors whose bytes differ, by their checksums
    #: values that were not compared: tensors without checksums or cut otherwise, objects that need code to load
    not_compared: list[str] = field(default_factory=list)
    compared: int = 0  #: tensors whose values or checksums were compared
    compared_bytes: int = 0

    @property
    def different(self) -> bool:
        return bool(self.only_a or self.only_b or self.kinds or self.objects or self.values or self.checksums)

    @property
    def equal(self) -> bool:
        return not (self.different or self.not_compared)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    with_values: bool = False,
    bits: bool = False,
    keys: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diff:
    """Compares two checkpoints, whose formats may differ. Memory is bounded; data is verified while it is read.

    Without values or bits it compares the checksums that both have of a tensor, which reads no data, and objects.
    `not_compared` has the keys of what cannot be compared so.

    Args:
        with_values: compares values too, also of tensors that differ in dtype alone. Objects are equal if their types
            are, and the values of numbers, arrays and tensors in containers; other objects say it themselves.
        bits: compares bits in place of values, except those of tensors that differ in dtype.
        keys: which keys: names, prefixes up to a dot, or `fnmatch` patterns; with `!` before it, all but these.
        rename: from keys of `a` to those of `b`: a function, or a mapping of keys or of prefixes up to a dot, as for
            conversions. Then `keys` are those of `a`, and all of `b` is compared with them.
        progress: called with the bytes compared so far and in total.

    Raises `MissingKeysError` for `keys` that match nothing in both, ValueError if two keys get one name, and the errors
    of reading.
    """
    with closing(open_checkpoint(checkpoint_path(a))) as first, closing(open_checkpoint(checkpoint_path(b))) as second:
        for checkpoint in (first, second):
            checkpoint.check_malformed()
        selection = Selection(keys)
        with_values = with_values or bits
        if rename is None:
            return _diff(first, second, with_values, bits, selection, progress)
        stored = [*first.tensors, *first.objects]
        selection.check(stored)
        names = rename_keys(selection.of(stored), rename_function(rename))
        return _diff(_Renamed(first, names), second, with_values, bits, Selection(None), progress)


class _Renamed(Checkpoint):
    """The checkpoint `of`, of which only the keys in `names` are seen, under their new names."""

    def __init__(self, of: Checkpoint, names: Mapping[str, str]) -> None:
        self._of = of
        self._key_of = {name: key for key, name in names.items()}
        self.format, self.path, self.root = of.format, of.path, of.root
        self.tensors = {name: of.tensors[key] for name, key in self._key_of.items() if key in of.tensors}
        self.objects = {name: of.objects[key] for name, key in self._key_of.items() if key in of.objects}

    def load_objects(self, keys: Iterable[str]) -> dict[str, Any]:
        names = {self._key_of[name]: name for name in keys}
        return {names[key]: value for key, value in self._of.load_objects(list(names)).items()}

    def checksum(self, chunk: Chunk) -> int:
        return self._of.checksum(chunk)

    def read(self, reads: Sequence[Read]) -> None:
        self._of.read([replace(read, key=self._key_of[read.key]) for read in reads])


def _diff(
    a: Checkpoint,
    b: Checkpoint,
    with_values: bool,
    bits: bool,
    selection: Selection,
    progress: Callable[[int, int], None] | None,
) -> Diff:
    every = dict.fromkeys((*a.tensors, *a.objects, *b.tensors, *b.objects))
    if has_fingerprint(a) or has_fingerprint(b):  # it follows from the other values, which are compared
        every.pop(FINGERPRINT_KEY, None)
    selection.check(every)
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    result = Diff()
    common = []
    for key in every:
        if key not in selection:
            continue
        if key not in kinds_b:
            result.only_a.append(key)
        elif key not in kinds_a:
            result.only_b.append(key)
        else:
            if kinds_a[key] != kinds_b[key]:
                result.kinds[key] = kinds_a[key], kinds_b[key]
            common.append(key)
    if not with_values:
        _compare_checksums(a, b, [key for key in common if key not in result.kinds], result)
        return result
    both = [key for key in common if key in a.tensors and key in b.tensors]
    tensors = [key for key in both if a.tensors[key].shape == b.tensors[key].shape]
    found = {key: ValueDifference(key) for key in tensors}
    for key, one, other in _values(a, b, tensors, progress):
        compare(found[key], one, other, bits)
    result.values = [difference for difference in found.values() if not difference.equal]
    objects = [key for key in common if key not in a.tensors and key not in b.tensors]
    ours, theirs = a.load_objects(objects), b.load_objects(objects)
    result.objects = [key for key in objects if not same(ours[key], theirs[key], bits)]
    result.compared, result.compared_bytes = len(tensors), sum(a.tensors[key].bytes for key in tensors)
    return result


def _values(
    a: Checkpoint, b: Checkpoint, keys: Iterable[str], progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields the values of tensors that have the same shape in both, as flat pieces that follow each other."""
    done, total = 0, sum(a.tensors[key].bytes for key in keys)
    for group in groups_of(_reads(a, b, keys), lambda pair: max(of.target.nbytes for of in pair), _GROUP_BYTES):
        a.read([one for one, _ in group])
        b.read([other for _, other in group])
        for one, other in group:
            yield one.key, one.target.reshape(-1), other.target.reshape(-1)
            done += one.target.nbytes
            if progress is not None:
                progress(done, total)


def _reads(a: Checkpoint, b: Checkpoint, keys: Iterable[str]) -> Iterator[tuple[Read, Read]]:
    for key in keys:
        dtypes = a.tensors[key].dtype, b.tensors[key].dtype
        itemsize = max(dtype.itemsize for dtype in dtypes)
        for offsets, sizes in cut(a.tensors[key].shape, max(1, _GROUP_BYTES // itemsize)):
            one, other = (Read(key, offsets, torch.empty(sizes, dtype=dtype, device="cpu")) for dtype in dtypes)
            yield one, other


def _compare_checksums(a: Checkpoint, b: Checkpoint, keys: Iterable[str], result: Diff) -> None:
    """Compares what is of one kind in both: tensors by checksums, objects by values where checksums do not suffice."""
    for key in keys:
        if key in a.tensors:
            found = _same_checksums(a, b, key)
            if found is None:
                result.not_compared.append(key)
                continue
            result.compared += 1
            result.compared_bytes += a.tensors[key].bytes
            if not found:
                result.checksums.append(key)
        elif not 0 <= a.objects[key].crc == b.objects[key].crc:
            try:
                one, other = (source.load_objects([key])[key] for source in (a, b))
            except UntrustedCheckpointError:
                result.not_compared.append(key)
            else:
                result.objects.extend([] if same(one, other, bits=True) else [key])


def _same_checksums(a: Checkpoint, b: Checkpoint, key: str) -> bool | None:
    """Whether a tensor's bytes have the same checksums in both; None: that is not known."""
    one, other = (
        {(chunk.offsets, chunk.sizes): of.checksum(chunk) for chunk in of.tensors[key].chunks} for of in (a, b)
    )
    if one.keys() != other.keys():  # cut otherwise
        return None
    pairs = [(crc, other[box]) for box, crc in one.items()]
    if any(-1 not in pair and pair[0] != pair[1] for pair in pairs):
        return False
    return None if any(-1 in pair for pair in pairs) else True


def _kinds(source: Checkpoint) -> dict[str, str]:
    tensors = {
        key: f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}" for key, info in source.tensors.items()
    }
    return tensors | dict.fromkeys(source.objects, "an object")


def compare(result: ValueDifference, a: torch.Tensor, b: torch.Tensor, bits: bool = False) -> None:
    """Adds the comparison of two flat tensors of equally many elements."""
    result.elements += a.numel()
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and not a.dtype.is_floating_point:
        return
    try:
        one, other = _as_numbers(a), _as_numbers(b)
    except TypeError:
        result.unknown = True
        result.different += int(_other_bits(a, b).sum())
        return
    finite_a, finite_b = torch.isfinite(one), torch.isfinite(other)
    result.not_finite_a += int((~finite_a).sum())
    result.not_finite_b += int((~finite_b).sum())
    differs = _other_bits(a, b) if bits and a.dtype == b.dtype else ~_same_numbers(a, b, one, other)
    count = int(differs.sum())
    if count == 0:
        return
    result.different += count
    where = differs & finite_a & finite_b & (one != other)
    if bool(where.any()):
        one, other = one[where], other[where]
        apart = (one - other).abs()
        result.max_abs = max(result.max_abs, float(apart.max()))
        result.max_rel = max(result.max_rel, float((apart / torch.maximum(one.abs(), other.abs())).max()))


def _as_numbers(piece: torch.Tensor) -> torch.Tensor:
    """The values as float64, or complex128. Raises TypeError for packed dtypes, whose values torch cannot tell."""
    if piece.is_complex():
        return piece.to(torch.complex128)
    try:
        return piece.to(torch.float64)
    except (RuntimeError, NotImplementedError):  # float8 of some kinds goes through float32 only
        try:
            return piece.to(torch.float32).to(torch.float64)
        except (RuntimeError, NotImplementedError) as error:
            raise TypeError(f"torch has no values of {piece.dtype}") from error


def _other_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements differ in a bit."""
    if a.itemsize != b.itemsize:
        return torch.ones(a.numel(), dtype=torch.bool, device="cpu")
    return differing_elements(a, b)


def _same_numbers(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which elements of `a` and `b` are the same numbers. `one`, `other`: `_as_numbers` of them."""
    if one.is_complex() or other.is_complex():
        parts = [torch.view_as_real(values.to(torch.complex128)) for values in (one, other)]
        return ((parts[0] == parts[1]) | (parts[0].isnan() & parts[1].isnan())).all(-1)
    if a.dtype == b.dtype and not a.dtype.is_floating_point:
        return a == b
    same = (one == other) | (one.isnan() & other.isnan())
    if not {a.dtype, b.dtype}.isdisjoint({torch.int64, torch.uint64}):  # beyond 2**53 they are not exact in float64
        fits = one.abs() < 2**63
        same &= ~fits | (a.to(torch.int64) == b.to(torch.int64))
    return same


def same(a: object, b: object, bits: bool = False) -> bool:
    """Whether two objects are equal: their types, and their values or bits; others as far as they say so themselves."""
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return _same_tensors(a, b, bits)
        if isinstance(a, dict) and isinstance(b, dict):
            # 1 and True are equal as keys, too: their types tell them apart.
            kinds = [{(type(key), key) for key in keys} for keys in (a, b)]
            return kinds[0] == kinds[1] and all(same(a[key], b[key], bits) for key in a)
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(same(one, other, bits) for one, other in zip(a, b, strict=True))
        numpy: Any = sys.modules.get("numpy")  # an extra; an object of it has imported it
        if numpy is not None and isinstance(a, (numpy.ndarray, numpy.generic)):
            return _same_arrays(numpy, numpy.asarray(a), numpy.asarray(b), bits)
        if isinstance(a, float) and isinstance(b, float) and bits:
            return struct.pack("d", a) == struct.pack("d", b)
        if isinstance(a, complex) and isinstance(b, complex):
            return same(a.real, b.real, bits) and same(a.imag, b.imag, bits)
        return bool(a == b) or bool(a != a and b != b)
    except Exception:  # an object may do anything when it is compared
        return False


def _same_tensors(a: torch.Tensor, b: torch.Tensor, bits: bool) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return bool(torch.equal(a, b))
    result = ValueDifference("")
    one, other = (tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1) for tensor in (a, b))
    compare(result, one, other, bits)
    return result.equal


def _same_arrays(numpy: Any, a: Any, b: Any, bits: bool) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        return same(a.tolist(), b.tolist(), bits)
    if bits or a.dtype.kind not in "fc":
        return bool(a.tobytes() == b.tobytes())
    if a.dtype.kind == "c":
        return _same_arrays(numpy, a.real, b.real, bits) and _same_arrays(numpy, a.imag, b.imag, bits)
    return bool(numpy.array_equal(a, b, equal_nan=True))
