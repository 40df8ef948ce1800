"""Finds quantised tensors, and makes their values of the stored numbers and scales. Else no cast may leave scales out.

The scheme is that of `quantization_config` in `config.json` beside the files:

- `fp8` with `weight_block_size` (DeepSeek): `w` of float8_e4m3fn, and `w_scale_inv` with a scale for each block of the
  last two dimensions.
- `mxfp4` (GPT-OSS): `w_blocks` of bytes with two numbers each, in groups of 16 bytes, and `w_scales` with an exponent
  for each group. Its values have two keys: `w_blocks`, as torch's `QuantizedHuggingFaceStorageReader` names them, and
  `w`, with the last two dimensions exchanged, as transformers has them.
- `compressed-tensors` of format `float-quantized`: `w` of float8_e4m3fn, and `w_scale` for the tensor or each row. The
  values have the precision of the scales, as compressed-tensors makes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from .._engine import _C
from .._engine.overlap import groups_of, overlap
from .._state.tensor_table import narrowed
from ..errors import CheckpointError, some
from .checkpoint import Read, TensorInfo, cut
from .quantized_names import BLOCKS, SCALES, scales_of
from .stacking import Composite, Stack, check_names, joined, restacked

FLOAT8 = torch.float8_e4m3fn
VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  #: dtypes of values that can be asked for
_ENGINE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_LARGE_SCALE = 253  # the least exponent, 2^126, with which a number of 4 bits may not be a float32
_GROUP = 32  # numbers with one exponent, in 16 bytes
_PIECE_ELEMENTS = 16 << 20  # of a piece; the numbers of two groups of pieces are in memory at a time


@dataclass(frozen=True)
class Quantized:
    """A tensor of values, and the stored tensors that they are made of."""

    shape: tuple[int, ...]
    numbers: str  #: key
    scales: str  #: key
    numbers_dtype: torch.dtype
    scales_dtype: torch.dtype
    block: tuple[int, int]  #: rows and columns with one scale
    flat_scales: bool = False  #: whether the scales are stored as a vector
    is_exchanged: bool = False  #: whether the last two dimensions are those of the numbers, exchanged
    keeps_precision: bool = False  #: whether the values are rounded to the dtype of the scales

    @property
    def is_mxfp4(self) -> bool:
        return self.numbers_dtype == torch.uint8

    def made_as(self, wanted: torch.dtype) -> torch.dtype:
        """The dtype in which the engine makes values of a dtype."""
        if self.keeps_precision:
            return self.scales_dtype
        return wanted if wanted in _ENGINE_DTYPES else torch.float32


def find(config: str, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Quantized], str]:
    """Returns the quantised tensors whose scheme is known, and why others have no known scheme.

    `config`: `quantization_config` as JSON.
    """
    known = json.loads(config)
    known = known if isinstance(known, dict) else {}
    method = known.get("quant_method")
    if method == "fp8":
        match known.get("weight_block_size"):
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return _of_float8(tensors, "_scale_inv", (rows, columns)), "its scales do not fit it"
            case block:
                return {}, f"of quant_method 'fp8' only weight_block_size=[rows, columns] is known, not {block!r}"
    if method == "mxfp4":
        return _of_mxfp4(tensors), "its scales do not fit it"
    if method == "compressed-tensors" and known.get("format") == "float-quantized":
        return _of_float8(tensors, "_scale", None), "its scales do not fit it"
    told = f" of format {known['format']!r}" if "format" in known else ""
    return {}, f"the scheme of quant_method {method!r}{told} is not known"


def _of_float8(tensors: Mapping[str, TensorInfo], suffix: str, block: tuple[int, int] | None) -> dict[str, Quantized]:
    found = {}
    for key, info in tensors.items():
        scales = tensors.get(key + suffix)
        if (
            scales is None
            or info.dtype != FLOAT8
            or key + "_zero_point" in tensors
            or len(info.shape) < 2
            or not scales.dtype.is_floating_point
        ):
            continue
        *others, rows, columns = info.shape
        if block is not None:
            size = block
            if scales.shape != (*others, -(-rows // size[0]), -(-columns // size[1])):
                continue
        elif scales.dtype in _ENGINE_DTYPES and (
            scales.shape == (*others, rows, 1) or (scales.shape == (1,) and not others)
        ):
            size = (max(1, rows) if scales.shape == (1,) else 1, max(1, columns))
        else:
            continue
        found[key] = Quantized(
            info.shape, key, key + suffix, info.dtype, scales.dtype, size, len(scales.shape) == 1,
            keeps_precision=block is None,
        )  # fmt: skip
    return found


def _of_mxfp4(tensors: Mapping[str, TensorInfo]) -> dict[str, Quantized]:
    found = {}
    for key, info in tensors.items():
        stem = key.removesuffix(BLOCKS)
        scales = tensors.get(stem + SCALES)
        if stem == key or scales is None or {info.dtype, scales.dtype} != {torch.uint8}:
            continue
        if len(info.shape) < 3 or info.shape[-1] != _GROUP // 2 or info.shape[:-1] != scales.shape:
            continue
        *others, rows, groups = scales.shape
        for name, shape in (
            (key, (*others, rows, groups * _GROUP)),
            (stem, (*others, groups * _GROUP, rows)),
        ):
            if name == key or name not in tensors:
                found[name] = Quantized(
                    shape, key, stem + SCALES, info.dtype, scales.dtype, (1, _GROUP), is_exchanged=name != key
                )
    return found


def of_values(
    tensors: Mapping[str, TensorInfo],
    known: Mapping[str, Quantized],
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
) -> dict[str, TensorInfo]:
    """Replaces numbers and scales by the values made of them, wherever `dtype_of`, given a key and the dtype of the
    numbers, returns a dtype of values."""
    result, scales = {}, set()
    values = {of.numbers: (key, of) for key, of in known.items() if not of.is_mxfp4 or of.is_exchanged}
    for stored, info in tensors.items():
        key, of = values.get(stored, (stored, None))
        wanted = FLOAT8 if of is None else dtype_of(key, FLOAT8)
        if of is None or wanted not in VALUE_DTYPES:
            result[stored] = info
        else:
            exact = of.is_mxfp4 and wanted == torch.float64
            result[key] = TensorInfo(of.shape, wanted if exact else of.made_as(wanted))
            scales.add(of.scales)
    return {key: info for key, info in result.items() if key not in scales}


@dataclass
class _Piece:
    """A box of values, and memory for what it is made of."""

    of: Quantized
    target: torch.Tensor  #: of the box
    numbers: torch.Tensor
    scales: torch.Tensor
    first: tuple[int, int]  #: of the box in its first block; last two dimensions, as the numbers are stored

    def make(self, threads: int) -> None:
        of, made_as = self.of, self.of.made_as(self.target.dtype)
        shape = (*self.numbers.shape[:-2], self.numbers.shape[-2] * _GROUP) if of.is_mxfp4 else self.numbers.shape
        target = self.target.transpose(-1, -2) if of.is_exchanged else self.target
        in_place = (
            target.is_contiguous() and target.dtype == made_as and target.device.type == "cpu" and target.shape == shape
        )
        values = target if in_place else torch.empty(shape, dtype=made_as, device="cpu")
        if of.is_mxfp4:
            # Of float64 alone they may be 2^128 or more. These are made 2^8 times smaller first.
            large = (self.scales >= _LARGE_SCALE) & (self.target.dtype == torch.float64)
            scales = self.scales - 8 * large.to(torch.uint8)
            _C.dequantize_mxfp4(
                scales.numel(), self.numbers.data_ptr(), scales.data_ptr(), _ENGINE_DTYPES[made_as],
                values.data_ptr(), threads,
            )  # fmt: skip
            if large.any():
                values = values.to(torch.float64) * torch.where(large, 2.0**8, 1.0).repeat_interleave(_GROUP, -1)
        else:
            scales = self.scales.to(torch.float32)
            box = (prod(shape[:-2]), *shape[-2:], *self.first, *of.block)
            _C.dequantize_float8(
                box, self.numbers.data_ptr(), scales.data_ptr(), _ENGINE_DTYPES[made_as], values.data_ptr(), threads
            )
        if not in_place:
            target.copy_(values.narrow(-1, self.first[1], target.shape[-1]) if of.is_mxfp4 else values)


def fill(
    boxes: Iterable[tuple[Quantized, Sequence[int], torch.Tensor]],
    read: Callable[[list[Read]], None],
    threads: int,
) -> None:
    """Fills tensors on any device with boxes of values. A box: the quantised tensor, the box's offsets in it, and the
    tensor to fill. `read` reads numbers and scales, only those of the boxes. While one group of pieces is read, the
    values of the one before are made."""

    def filled() -> Iterator[list[_Piece]]:
        for group in groups_of(_pieces(boxes), lambda piece: piece[0].target.numel(), _PIECE_ELEMENTS):
            read([one for _, reads in group for one in reads])
            yield [piece for piece, _ in group]

    def make(group: list[_Piece]) -> None:
        for piece in group:
            piece.make(threads)

    for _ in overlap(filled(), make):
        pass


def _pieces(
    boxes: Iterable[tuple[Quantized, Sequence[int], torch.Tensor]],
) -> Iterator[tuple[_Piece, list[Read]]]:
    for of, offsets, tensor in boxes:
        for inside, sizes in cut(tuple(tensor.shape), _PIECE_ELEMENTS):
            if 0 not in sizes:
                at = [a + b for a, b in zip(offsets, inside, strict=True)]
                yield _piece(of, at, narrowed(tensor, inside, sizes))


def _piece(of: Quantized, offsets: Sequence[int], target: torch.Tensor) -> tuple[_Piece, list[Read]]:
    sizes = list(target.shape)
    begin = list(offsets)
    if of.is_exchanged:
        begin[-2:], sizes[-2:] = begin[:-3:-1], sizes[:-3:-1]
    starts = [start // block for start, block in zip(begin[-2:], of.block, strict=True)]
    ends = [-(-(start + size) // block) for start, size, block in zip(begin[-2:], sizes[-2:], of.block, strict=True)]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    first = tuple(start % block for start, block in zip(begin[-2:], of.block, strict=True))
    scales = torch.empty((*sizes[:-2], *counts), dtype=of.scales_dtype, device="cpu")
    if of.is_mxfp4:
        numbers = torch.empty((*scales.shape, _GROUP // 2), dtype=torch.uint8, device="cpu")
        number_offsets = [*begin[:-2], *starts, 0]
    else:
        numbers = torch.empty(sizes, dtype=of.numbers_dtype, device="cpu")
        number_offsets = begin
    scale_read = Read(of.scales, [*begin[:-2], *starts], scales)
    if of.flat_scales:
        scale_read = Read(of.scales, starts[:1], scales.view(-1))
    piece = _Piece(of, target, numbers, scales, (first[0], first[1]))
    return piece, [Read(of.numbers, number_offsets, numbers), scale_read]


# --- Stacked, concatenated and split


def stacked_with_scales(
    tensors: Sequence[Composite],
    stack: Stack,
    present: Container[str],
    known: Mapping[str, Quantized],
    aliases: Mapping[str, str],
) -> list[Composite]:
    """Applies rules as `restacked` does, and those that take numbers of quantised tensors to their scales, too, unless
    these have rules of their own. Raises `CheckpointError` if numbers and scales would not belong together then.

    `present`: all keys of the checkpoint. `known`: the quantised tensors whose scheme is known. `aliases`: {other name:
    stored name}; scales are named after the stored one.
    """
    made = restacked(tensors, stack)
    stored, result = {of.keys[0]: of for of in tensors}, {of.name: of for of in made}
    added: list[Composite] = []
    followed: set[str] = set()  # names of scales that no rule of their own takes
    kept: list[Composite] = []  # scales of tensors that no rule takes
    for of in made:
        dtype = str(of.stored_dtype).removeprefix("torch.")
        found = [scales_of(aliases.get(key, key), dtype, present) for key in of.keys]
        scales = [stored[key] for key in found if key in stored]
        if of.is_stored:
            kept += scales
        elif any(found):
            if len(scales) != len(found):
                raise CheckpointError(f"stack: {of.name}: not all of {some(of.keys)} have scales", key=of.name)
            wanted = _scales_of_composite(of, [stored[key] for key in of.keys], scales, known)
            if result.get(wanted.name) == wanted:
                continue
            if any(result.get(scale.name) != scale for scale in scales):
                raise CheckpointError(
                    f"stack: a rule takes the scales {scales[0].name}, and does not make {wanted.name} of them as "
                    f"{of.name} is made. Without a rule of their own, scales are made as their numbers are",
                    key=of.name,
                )
            followed.update(scale.name for scale in scales)
            added.append(wanted)
    made = [of for of in made if of.name not in followed or not of.is_stored] + added
    there = set(made)
    for scale in kept:
        if scale not in there:
            text = f"stack: a rule takes the scales {scale.name}, and not the numbers that they belong to"
            raise CheckpointError(text, key=scale.name)
    check_names(made)
    return made


def _scales_of_composite(
    of: Composite, numbers: Sequence[Composite], scales: Sequence[Composite], known: Mapping[str, Quantized]
) -> Composite:
    """Returns the scales of a composite of quantised tensors, made as it is made."""
    ends = set()
    for number, scale in zip(numbers, scales, strict=True):
        common = len(os.path.commonprefix([number.keys[0], scale.keys[0]]))  # noqa: RUF071  # of letters
        ends.add((number.keys[0][common:], scale.keys[0][common:]))
    (end, of_scales), *others = ends
    if others or not of.name.endswith(end):
        text = f"stack: {of.name}: expected a name that ends with {end!r}, so that its scales are found beside it"
        raise CheckpointError(text, key=of.name)
    name = of.name.removesuffix(end) + of_scales
    in_layer = max(1, len(of.rows))
    own_rows = all(of.shape[:1] == scale.shape[:1] for of, scale in zip(numbers[:in_layer], scales, strict=False))
    if not own_rows and (of.index is not None or (of.rows and not _end_with_blocks(numbers[:in_layer], known))):
        raise CheckpointError(
            f"stack: {of.name}: the scales {scales[0].name} of shape {scales[0].shape} belong to blocks of "
            f"{numbers[0].name}, of shape {numbers[0].shape}, that a rule cuts, or that are not known",
            key=of.name,
        )
    if of.index is not None:
        return replace(scales[0], name=name, shape=scales[0].shape[1:], index=of.index)
    return joined(name, scales, in_layer, of.stacked)


def _end_with_blocks(numbers: Sequence[Composite], known: Mapping[str, Quantized]) -> bool:
    """Whether each of the tensors that are concatenated, but the last, ends with a whole block."""
    found = [known[number.keys[0]] for number in numbers if number.keys[0] in known]
    return len(found) == len(numbers) and all(
        not of.flat_scales and len(of.shape) == 2 and of.shape[0] % of.block[0] == 0 for of in found[:-1]
    )
