"""Runs `vescale-ckpt plan`, which plans a save or a load for any number of simulated ranks."""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace

import torch

from .._observe.amounts import size
from .._storage.open_storage import is_file, is_folder
from ..settings import Broadcast
from ..simulate import models
from ..simulate.loading import simulate_load
from ..simulate.models import MODELS, Entry
from ..simulate.nodes import simulate_nodes
from ..simulate.parallelism import Parallelism
from ..simulate.simulation import Simulation, simulate
from . import output
from .output import FINE


def run(options: Namespace) -> int:
    """Simulates, prints the figures and returns the exit status. Raises `ValueError`, and `CheckpointError` for a
    checkpoint that cannot be read."""
    for name in ("ranks", "fsdp", "tp", "ep", "replicas", "node_size", "saved_ranks", "domain_nodes"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')}: {number} is less than 1")
    for name in ("storage", "link", "disk"):
        if (rate := getattr(options, name)) is not None and not 0 < rate < math.inf:
            raise ValueError(f"--{name}: {rate} is no bandwidth")
    if options.copies is not None and (options.load or options.copies < 0):
        raise ValueError(f"--copies: {options.copies} is less than 0, or takes no --load")
    if not options.load and (options.saved_ranks or options.broadcast != "auto"):
        raise ValueError("--saved-ranks and --broadcast take --load")
    more = options.domain_nodes or options.disk or (not options.load and (options.storage or options.link))
    if options.copies is None and more:
        raise ValueError("--storage and --link take --load or --copies, --domain-nodes and --disk take --copies")
    parallelism = _parallelism(options)
    entries = _entries(options.model, models.dtype_named(options.dtype))
    if options.optimizer == "adam":
        entries = models.with_adam(entries)
    if options.load:
        return _load(options, entries, parallelism)
    if options.copies is not None:
        return _nodes(options, entries, parallelism)
    found = simulate(entries, parallelism, options.placement, options.node_size)
    if options.json:
        output.print_json("plan/1", {**dataclasses.asdict(found), "imbalance": found.imbalance})
    else:
        output.print_facts(_facts(found))
    return FINE


def _load(options: Namespace, entries: list[Entry], parallelism: Parallelism) -> int:
    saved = options.saved_ranks and Parallelism(options.saved_ranks, options.saved_ranks, 1, 1)
    broadcast: dict[str, Broadcast] = {"auto": "auto", "always": True, "never": False}
    storage, link = (rate and rate * 1e9 for rate in (options.storage, options.link))
    found = simulate_load(entries, parallelism, saved, broadcast[options.broadcast], options.node_size, storage, link)
    if options.json:
        output.print_json("plan/1", {**dataclasses.asdict(found), "read": found.read})
        return FINE
    reads = found.read_by_rank
    facts = [
        ("ranks", f"{found.ranks:,} on {found.nodes:,} nodes; {found.saved_ranks:,} have saved"),
        ("read for each other", "yes" if found.broadcast else "no"),
        ("bytes read", f"{size(found.read)}; {size(found.read_alone)} if each rank reads what it needs"),
        ("bytes a rank", f"{size(min(reads))} to {size(max(reads))}"),
        ("a node, at most", f"reads {size(found.node_read_most)}, receives {size(found.node_received_most)}, "
                            f"sends {size(found.node_sent_most)}"),
        ("tables", f"{size(found.table_bytes)}, of which {size(found.gathered_bytes)} travel to the coordinator"),
    ]  # fmt: skip
    if found.planning_parts:
        memory = "unknown" if found.planning_memory is None else size(found.planning_memory)
        seconds, parts = f"{found.planning_seconds:.3f} s", f"{found.planning_parts} parts, {found.rounds} rounds"
        facts.append(("planning", f"{seconds} in {parts}, peak memory {memory}"))
    if found.seconds is not None:
        facts.append(("storage and links", f"{found.seconds:.3f} s at least"))
    output.print_facts(facts)
    return FINE


def _nodes(options: Namespace, entries: list[Entry], parallelism: Parallelism) -> int:
    rates = ((rate or math.inf) * 1e9 for rate in (options.storage, options.link, options.disk))
    found = simulate_nodes(entries, parallelism, options.copies, options.node_size, options.domain_nodes, *rates)
    if options.json:
        output.print_json("plan/1", dataclasses.asdict(found))
        return FINE
    rack = "any one rack, " if options.domain_nodes and found.domain_survived else ""
    seconds = {"restore from the nodes": found.restore_seconds, "restore without them": found.durable_restore_seconds}
    output.print_facts([
        ("ranks", f"{found.ranks:,} on {found.nodes:,} nodes"),
        ("a node, at most", f"writes {size(found.written_most)} of {size(found.stored)}, has {size(found.held_most)}"),
        ("a link, at most", f"sends {size(found.sent_most)}, receives {size(found.received_most)}"),
        ("may be lost", f"any {found.losses_survived} nodes, {rack}{found.pairs_survived:.4%} of the pairs of nodes"),
        *((name, f"{value:.3f} s at least") for name, value in seconds.items() if value is not None),
    ])  # fmt: skip
    return FINE


def _parallelism(options: Namespace) -> Parallelism:
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


def _facts(found: Simulation) -> list[tuple[str, str]]:
    memory = "unknown" if found.planning_memory is None else size(found.planning_memory)
    return [
        ("ranks", f"{found.ranks:,}"),
        ("items a rank", f"{found.items:,.0f}, of which it writes {found.pieces:,.0f}"),
        ("bytes a rank", f"{size(found.bytes_least)} to {size(found.bytes_most)}, mean {size(found.bytes_mean)}"),
        ("max / mean", f"{found.imbalance:.3f}"),
        ("planning", f"{found.planning_seconds:.3f} s on the coordinator"),
        ("peak memory", f"{memory}, of which {size(found.inventory_bytes)} came from the ranks"),
        ("metadata", f"{size(found.metadata_bytes)}, made in {found.metadata_seconds:.3f} s"),
        ("index", size(found.index_bytes)),
    ]
