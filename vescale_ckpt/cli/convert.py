"""Runs `vescale-ckpt convert`, which writes a checkpoint in another format."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import get_args

import torch.distributed as dist

from ..convert.formats import Format, format_of
from ..convert.run import Objects, convert

DESCRIPTION = """\
Write a checkpoint as another one: DCP, safetensors, a file of torch.save, numpy's .npz or a folder of .npy, verified on
the way, in bounded memory. Under torchrun the ranks share the work."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", metavar="SRC", help="what to convert; its format is recognised from the files")
    add("dst", metavar="DST", help="a directory or file")
    add("--format", choices=get_args(Format), help="of DST (default: what its name ends in)")
    add("--keys", action="append", metavar="PATTERN",
        help="convert only these: names, prefixes up to a dot, patterns; with ! before it, all but these")  # fmt: skip
    add("--rename", action="append", type=_pair, metavar="OLD=NEW", help="a name, or a prefix up to a dot")
    add("--rename-pattern", action="append", type=_pair, metavar="REGEX=NEW",
        help="a regular expression and what takes its place, applied in order")  # fmt: skip
    add("--dtype", action="append", metavar="[PATTERN=]DTYPE", help="convert floating-point tensors to it")
    add("--stack", action="append", type=_pair, metavar="OLD=NEW",
        help="stack layers.*.w=layers.w, or split layers.w=layers.*.w")  # fmt: skip
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of safetensors (default %(default)s)")
    add("--on-objects", choices=get_args(Objects), default="warn",
        help="what becomes of values that are no tensors and have no place (default %(default)s)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace what is there")
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Converts, prints the report on rank 0 and returns the exit status. Raises what `convert` raises."""
    format = options.format or format_of(options.dst)
    if format is None:
        raise ValueError(f"{options.dst}: its name says no format: --format is wanted")
    if options.rename and options.rename_pattern:
        raise ValueError("--rename and --rename-pattern exclude each other")
    rename = dict(options.rename) if options.rename else options.rename_pattern
    with _ranks_of_torchrun() as rank:
        report = convert(
            options.src,
            options.dst,
            format=format,
            rename=rename,
            keys=options.keys,
            dtype=_dtypes(options.dtype),
            max_shard_size=options.max_shard_size,
            stack=dict(options.stack) if options.stack else None,
            on_objects=options.on_objects,
            overwrite=options.overwrite,
        )
    if rank == 0 and options.json:
        print(json.dumps(asdict(report), indent=1))
    elif rank == 0:
        print(
            f"{report.tensors:,} tensors and {report.objects:,} objects, {report.bytes:,} bytes in {report.files:,} "
            f"files, {report.seconds:.2f} s"
        )
    return 0


def _pair(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} has no =")
    return old, new


def _dtypes(texts: list[str] | None) -> str | dict[str, str] | None:
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    return dict(text.rsplit("=", 1) if "=" in text else ("*", text) for text in texts)  # type: ignore[misc]


@contextmanager
def _ranks_of_torchrun() -> Iterator[int]:
    """A context that yields this process's rank. Under torchrun with several processes it joins their group."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
