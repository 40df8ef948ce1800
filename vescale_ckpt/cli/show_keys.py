"""Runs the command `inspect`: what a checkpoint is, its totals, and a tree of its keys."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field

from .._observe.amounts import size
from ..reports import CheckpointInfo, StoredObject
from . import output
from .output import FINE, clean

_IN_A_PICKLE = "in the pickle of the file"  # torch.save stores objects together
_MOST_OF_A_VALUE = 80  # characters
_MOST_CHILDREN = 40  # a level shows so many; of more the first ones and the last


def inspect(options: Namespace) -> int:
    from .._inspect.info import inspect

    info = inspect(options.path, options.keys)
    if options.json:
        content = asdict(info) | {"bytes": info.bytes, "file_bytes": info.file_bytes}
        output.print_json("inspect/1", content)
        return FINE
    chunks = sum(len(tensor.chunks) for tensor in info.tensors.values())
    missing = [name for name, length in info.files.items() if length < 0]
    parts = [name for name, tensor in info.tensors.items() if not tensor.whole]
    output.print_facts(
        [
            ("checkpoint", info.path),
            ("format", info.format + (f", written by {info.writer}" if info.writer else "")),
            *([("save", info.save_id)] if info.save_id else []),
            ("saved", _saved(info)),
            *([("fingerprint", info.fingerprint)] if info.fingerprint else []),
            ("tensors", f"{len(info.tensors):,} in {chunks:,} chunks, {size(info.bytes)}"),
            ("objects", f"{len(info.objects):,}, {_size(info.objects.values())}"),
            *([("aliases", f"{len(info.aliases):,} other names of tensors")] if info.aliases else []),
            ("files", f"{len(info.files):,}, {size(info.file_bytes)}"),
            *([("part", "of one machine: others may have what is missing")] if info.is_node_part else []),
            *([("missing", f"{len(missing):,} files: {', '.join(missing[:5])}")] if missing else []),
            *([("in part", f"{len(parts):,} tensors: {', '.join(parts[:5])}")] if parts else []),
        ]
    )
    print()
    for line in tree(info, options.depth, math.inf if options.all else _MOST_CHILDREN):
        print(line)
    return FINE


def _saved(info: CheckpointInfo) -> str:
    """When, by how many ranks and with what a checkpoint was saved."""
    if (by := info.saved_by) is None:
        return "not recorded"
    ranks = f"{by.ranks:,} rank{'s' * (by.ranks != 1)}"
    return f"{by.time}, by {ranks}, with vescale_ckpt {by.vescale_ckpt} and torch {by.torch}"


@dataclass
class _Node:
    """A level of the keys: all keys with one beginning."""

    children: dict[str, _Node] = field(default_factory=dict)
    leaf: str = ""  # what is stored under the key itself
    value: str = ""  # that of a plain object
    tensors: int = 0
    objects: int = 0
    bytes: int = 0


def tree(info: CheckpointInfo, depth: int, most: float = _MOST_CHILDREN) -> Iterable[str]:
    """The lines of a tree of keys, `depth` levels deep; 0: every key, in a list. `most`: lines of a level."""
    if depth == 0:
        names = {**info.tensors, **info.objects}
        width = min(60, max(map(len, names), default=0))
        for key, tensor in info.tensors.items():
            where = ", ".join(dict.fromkeys(chunk.file for chunk in tensor.chunks[:3]))
            more = ", ..." if len(tensor.chunks) > 3 else ""
            chunks = f"{len(tensor.chunks):,} chunks in " if len(tensor.chunks) != 1 else ""
            yield clean(
                f"{key:<{width}}  {_kind(tensor.dtype, tensor.shape)}  {size(tensor.bytes)}  {chunks}{where}{more}"
            )
        for key, value in info.objects.items():
            yield clean(f"{key:<{width}}  object{_shown(value)}  {_size([value])}  {value.file}")
        return
    root = _Node()
    for key, tensor in info.tensors.items():
        _add(root, key, _kind(tensor.dtype, tensor.shape), 1, tensor.bytes)
    for key, value in info.objects.items():
        _add(root, key, "object", 0, max(0, value.bytes), _shown(value))
    yield from _lines(root, depth, "", most)


def _size(objects: Collection[StoredObject]) -> str:
    """The bytes of objects, as far as each is a record of its own."""
    known = [one.bytes for one in objects if one.bytes >= 0]
    return size(sum(known)) if known or not objects else _IN_A_PICKLE


def _shown(stored: StoredObject) -> str:
    """The value of a plain object, in at most 80 characters; empty if it is not known."""
    text = "" if stored.value is None else f" = {stored.value!r}"
    return text if len(text) <= _MOST_OF_A_VALUE else f"{text[: _MOST_OF_A_VALUE - 1]}…"


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _add(root: _Node, key: str, leaf: str, tensors: int, count: int, value: str = "") -> None:
    node = root
    for name in (None, *key.split(".")):
        if name is not None:
            node = node.children.setdefault(name, _Node())
        node.tensors += tensors
        node.objects += 1 - tensors
        node.bytes += count
    node.leaf, node.value = leaf, value


def _lines(node: _Node, depth: int, indent: str, most: float) -> Iterable[str]:
    hidden = len(node.children) - most
    half = most // 2
    for number, (name, below) in enumerate(node.children.items()):
        if hidden > 0 and half <= number < len(node.children) - half:
            if number == half:
                yield f"{indent}… and {hidden:,} more (--all)"
            continue
        label = clean(name)
        while len(below.children) == 1 and not below.leaf:  # a level with one name below it takes no line of its own
            (only, below), *_ = below.children.items()
            label += "." + clean(only)
        amount = [size(below.bytes)] if below.bytes or below.tensors else []
        if not below.children:
            yield f"{indent}{label}  {below.leaf}{clean(below.value)}  {(amount or [_IN_A_PICKLE])[0]}"
            continue
        counts = [f"{below.tensors:,} tensors"] if below.tensors else []
        counts += [f"{below.objects:,} objects"] if below.objects else []
        yield f"{indent}{label}.  {', '.join(counts)}, {size(below.bytes)}"
        if depth > 1:
            yield from _lines(below, depth - 1, indent + "  ", most)
