"""Runs `vescale-ckpt plan`, which plans a save for any number of simulated ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import get_args

import torch

from .._storage.directory import is_file, is_folder
from ..settings import Placement
from ..simulate import models
from ..simulate.models import MODELS, Entry
from ..simulate.parallelism import Parallelism
from ..simulate.simulation import Simulation, simulate

DESCRIPTION = """\
Plan a save on any number of ranks from shapes alone: how many bytes each rank would write, and what planning it
costs. Dimension 0 is cut by --fsdp, the dimension of a layer's role (known by the usual names) by --tp, stacked
experts by --ep; what is left of --ranks are replicas."""
MODEL_NAMES = f"models: {', '.join(MODELS)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model below, a JSON file of names and shapes, or a checkpoint's directory")
    add("--ranks", type=_positive, metavar="N", help="all of them (default: replicas x fsdp x tp)")
    add("--fsdp", type=_positive, metavar="N", help="ranks that shard every tensor (default: all that are left)")
    add("--tp", type=_positive, default=1, metavar="N", help="ranks of tensor parallelism (default %(default)s)")
    add("--ep", type=_positive, default=1, metavar="N", help="ranks of expert parallelism (default %(default)s)")
    add("--replicas", type=_positive, metavar="N", help="copies of all of it (HSDP)")
    add("--ddp", action="store_true", help="nothing fully sharded: the same as --fsdp 1")
    add("--optimizer", choices=("none", "adam"), default="none",
        help="adam: a step and two float32 moments for each tensor (default %(default)s)")  # fmt: skip
    add("--dtype", default="bfloat16", help="of tensors that have none of their own (default %(default)s)")
    add("--placement", choices=get_args(Placement), default="balanced", help="who writes what (default %(default)s)")
    add("--node-size", type=_positive, default=8, metavar="N", help="ranks of a node (default %(default)s)")
    add("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def run(options: argparse.Namespace) -> int:
    """Simulates, prints the figures and returns the exit status. Raises `ValueError`, and `CheckpointError` for a
    checkpoint that cannot be read."""
    parallelism = _parallelism(options)
    entries = _entries(options.model, models.dtype_named(options.dtype))
    if options.optimizer == "adam":
        entries = models.with_adam(entries)
    found = simulate(entries, parallelism, options.placement, options.node_size)
    if options.json:
        print(json.dumps({**dataclasses.asdict(found), "imbalance": found.imbalance}, indent=1))
    else:
        print(_table(found))
    return 0


def _parallelism(options: argparse.Namespace) -> Parallelism:
    """Raises `ValueError` where the options contradict each other."""
    if options.ddp and options.fsdp not in (None, 1):
        raise ValueError("--ddp is --fsdp 1")
    fsdp = 1 if options.ddp else options.fsdp
    ranks = options.ranks or (options.replicas or 1) * (fsdp or 1) * options.tp
    if fsdp is None:
        fsdp = max(1, ranks // (options.tp * (options.replicas or 1)))
    parallelism = Parallelism(ranks, fsdp, options.tp, options.ep)
    if options.replicas not in (None, parallelism.replicas):
        raise ValueError(
            f"{ranks} ranks cannot be {options.replicas} (replicas) x {fsdp} (fsdp) x {options.tp} (tensor)"
        )
    return parallelism


def _entries(model: str, dtype: torch.dtype) -> list[Entry]:
    if model in MODELS:
        return MODELS[model].entries(dtype)
    if is_folder(model):
        return models.entries_in_checkpoint(model)
    if is_file(model):
        return models.entries_in_json(model, dtype)
    raise ValueError(f"{model} is no file, no directory and none of the models {', '.join(MODELS)}")


def _table(found: Simulation) -> str:
    memory = "unknown" if found.planning_memory is None else _size(found.planning_memory)
    rows = [
        ("ranks", f"{found.ranks:,}"),
        ("items a rank", f"{found.items:,.0f}, of which it writes {found.pieces:,.0f}"),
        ("bytes a rank", f"{_size(found.bytes_least)} to {_size(found.bytes_most)}, mean {_size(found.bytes_mean)}"),
        ("max / mean", f"{found.imbalance:.3f}"),
        ("planning", f"{found.planning_seconds:.3f} s on the coordinator"),
        ("peak memory", f"{memory}, of which {_size(found.inventory_bytes)} came from the ranks"),
        ("metadata", f"{_size(found.metadata_bytes)}, made in {found.metadata_seconds:.3f} s"),
        ("index", _size(found.index_bytes)),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.2f} {unit}"
