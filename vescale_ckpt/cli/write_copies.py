"""Runs the commands that write a checkpoint again: `convert`, `export` and `copy`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from .._checkpoint.recognize import Format, format_of
from .._convert.convert import Objects, convert_by_plan
from .._convert.copy import copy as copy_checkpoint
from .._convert.plan import Plan, Stack, fitting, plan
from .._observe.amounts import size
from .._state.key_selection import Rename
from .._storage.open_storage import checkpoint_path, storage_at
from ..errors import MissingKeysError
from . import output
from .output import FINE, clean

_CONFIG = "config.json"
_OF_CONFIGURATION = (".json", ".txt", ".model", ".jinja", ".py")  # configuration, tokenizer, code of a model


def convert(options: Namespace) -> int:
    """Converts, prints the report on rank 0 and returns the exit status. Raises what `convert` raises."""
    format = options.format or format_of(options.dst)
    if format is None:
        raise ValueError(f"{options.dst}: expected --format, as the name says none")
    rename = dict(output.pairs("--rename", options.rename)) or None
    rules = output.pairs("--stack", options.stack)
    stack = {tuple(old.split(",")) if "," in old else old: new for old, new in rules} or None
    return _convert(options, format, options.keys, rename, stack, options.on_objects, "convert")


def export(options: Namespace) -> int:
    """Converts a model's weights to safetensors, under the names that they have in the model."""
    key: str = options.key
    rename = {key: ""} if key else None
    configuration = _configuration(options.config, options.dst)
    try:
        status = _convert(options, "safetensors", [key] if key else None, rename, None, "warn", "export", configuration)
    except MissingKeysError as error:
        hint = "--key says under which name the model is; --key '' takes all that there is"
        raise MissingKeysError(error.missing, hint=hint) from None
    if int(os.environ.get("RANK", "0")) == 0 and not options.dst.endswith(".safetensors"):
        there = storage_at(checkpoint_path(options.dst))
        for name, content in configuration.items():
            there.write(name, content)
        if not options.json and not there.has(_CONFIG):
            print(f"there is no {_CONFIG}, which from_pretrained needs: --config FOLDER copies it and the tokenizer")
    return status


def _configuration(folder: str | None, dst: str) -> dict[str, bytes]:
    """The files of a model's folder that are no weights. Raises ValueError, FileNotFoundError."""
    if folder is None:
        return {}
    if dst.endswith(".safetensors"):
        raise ValueError(f"--config: expected a directory as DST, got {dst}")
    storage = storage_at(checkpoint_path(folder))
    if not storage.has(_CONFIG):
        raise FileNotFoundError(f"--config: {folder} has no {_CONFIG}")
    names = [name for name in storage.names() if name.endswith(_OF_CONFIGURATION) and not name.endswith(".index.json")]
    return {name: storage.read(name) for name in names}


def copy(options: Namespace) -> int:
    try:
        with output.progress("copying", options.quiet) as progress:
            report = copy_checkpoint(options.src, options.dst, overwrite=options.overwrite, progress=progress)
    except KeyboardInterrupt:
        print("stopped: the same command goes on with the files that are missing", file=sys.stderr)
        raise
    if options.json:
        output.print_json("copy/1", asdict(report))
        return FINE
    resumed = f", of which {report.resumed_files:,} files were complete before" if report.resumed_files else ""
    print(f"{clean(report.path)}: {report.files:,} files, {size(report.bytes)}{resumed}, {report.seconds:.2f} s")
    if report.unverified_bytes:
        print(f"{size(report.unverified_bytes)} have no checksums: they are as they were read")
    if report.left_out:
        print(f"left out, as no part of the checkpoint: {clean(', '.join(report.left_out))}")
    return FINE


def _convert(
    options: Namespace,
    format: Format,
    keys: list[str] | None,
    rename: Rename | None,
    stack: Stack | None,
    on_objects: Objects,
    schema: str,
    beside: dict[str, bytes] | None = None,
) -> int:
    dtypes = _dtypes(options.dtype)

    def make(source: Any) -> Plan:
        planned = plan(source, keys, rename, stack, dtypes)
        if beside and _CONFIG in beside:
            beside[_CONFIG] = fitting(beside[_CONFIG], planned)
        return planned

    with _ranks_of_torchrun() as rank, output.progress("converting", options.quiet) as progress:
        report = convert_by_plan(
            options.src,
            options.dst,
            format,
            make,
            options.max_shard_size,
            on_objects,
            options.overwrite,
            progress=progress if rank == 0 else None,
        )
    if rank == 0 and options.json:
        output.print_json(f"{schema}/1", asdict(report))
    elif rank == 0:
        objects = f" and {report.objects:,} objects" if report.objects else ""
        print(
            f"{clean(os.fspath(options.dst))}: {report.tensors:,} tensors{objects}, {size(report.bytes)} in "
            f"{report.files:,} file{'s' if report.files != 1 else ''}, {report.seconds:.2f} s"
        )
    return FINE


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
