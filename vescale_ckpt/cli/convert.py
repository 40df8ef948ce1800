"""Runs `vescale-ckpt convert`, which writes a checkpoint in another format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import torch.distributed as dist

from .._convert.formats import format_of
from .._convert.run import convert
from . import output
from .output import FINE


def run(options: SimpleNamespace) -> int:
    """Converts, prints the report on rank 0 and returns the exit status. Raises what `convert` raises."""
    format = options.format or format_of(options.dst)
    if format is None:
        raise ValueError(f"{options.dst}: its name says no format: --format is wanted")
    if options.rename and options.rename_pattern:
        raise ValueError("--rename and --rename-pattern exclude each other")
    rename = dict(_pairs("--rename", options.rename)) or _pairs("--rename-pattern", options.rename_pattern) or None
    with _ranks_of_torchrun() as rank:
        report = convert(
            options.src,
            options.dst,
            format=format,
            rename=rename,
            keys=options.keys,
            dtype=_dtypes(options.dtype),
            max_shard_size=options.max_shard_size,
            stack=dict(_pairs("--stack", options.stack)) or None,
            on_objects=options.on_objects,
            overwrite=options.overwrite,
        )
    if rank == 0 and options.json:
        output.print_json("convert/1", asdict(report))
    elif rank == 0:
        print(
            f"{report.tensors:,} tensors and {report.objects:,} objects, {report.bytes:,} bytes in {report.files:,} "
            f"files, {report.seconds:.2f} s"
        )
    return FINE


def _pairs(option: str, texts: list[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for text in texts or ():
        old, sign, new = text.partition("=")
        if not sign:
            raise ValueError(f"{option}: {text!r} has no =")
        pairs.append((old, new))
    return pairs


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
