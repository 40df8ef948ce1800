"""Saves and loads of many small tensors on a few ranks, where what ranks tell each other takes most of the time."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

import vescale_ckpt
from benchmarks.planning.local import State, dtensors, stock_planner
from benchmarks.timing import STOCK, Sample

Model = dict[str, DTensor]

_PATIENCE = timedelta(minutes=10)
_PAUSE_BEFORE_DESTROY = 0.5  # gloo aborts where a peer still reads from its socket


@dataclass(frozen=True)
class Candidate:
    """``save`` writes to a path, ``load`` reads from one."""

    save: Callable[[State, Path], object]
    load: Callable[[State, Path], object] | None = None


def run(ranks: int, tensors: int, rounds: int, directory: Path, seed: int) -> list[Sample]:
    """Seconds of the slowest rank. Two more rounds come before the counted ones, and fill the caches."""
    context = get_context("spawn")
    results: SimpleQueue[list[Sample]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="vescale-ckpt-benchmark-", dir=directory) as own:
        arguments = (ranks, tensors, rounds, Path(own), seed, results)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            raise RuntimeError(f"ranks {failed} failed")
        return results.get()


def _rank(
    rank: int, ranks: int, tensors: int, rounds: int, directory: Path, seed: int, results: SimpleQueue[list[Sample]]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_PATIENCE)
    samples = _rounds(dtensors(tensors), rounds, directory, seed)
    if rank == 0:
        results.put(samples)
    dist.barrier()
    sleep(_PAUSE_BEFORE_DESTROY)
    dist.destroy_process_group()


def _rounds(model: Model, rounds: int, directory: Path, seed: int) -> list[Sample]:
    case = f"steady, {len(model):,} DTensors of 1 KiB a rank on {dist.get_world_size()} ranks"
    candidates = _candidates()
    order = random.Random(seed)
    samples = []
    for number in range(-2, rounds):
        names = list(candidates)
        order.shuffle(names)
        for name in names:
            seconds = _save_and_load(candidates[name], model, directory / "checkpoint", number)
            if number >= 0:
                samples.append(Sample(case, name, number, seconds))
    return samples


def _save_and_load(candidate: Candidate, model: Model, path: Path, number: int) -> dict[str, float]:
    state = {"model": model}
    value = float(number + 10 * (dist.get_rank() + 1))
    _fill(model, value)
    seconds = {"save": _slowest(lambda: candidate.save(state, path))}
    if candidate.load is not None:
        load = candidate.load
        _fill(model, -1.0)
        seconds["load"] = _slowest(lambda: load(state, path))
        wrong = [name for name, tensor in model.items() if not torch.all(tensor.to_local() == value)]
        if wrong:
            raise RuntimeError(f"{len(wrong)} tensors came back with other values: {wrong[:3]}")
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return seconds


def _fill(model: Model, value: float) -> None:
    for tensor in model.values():
        tensor.to_local().fill_(value)


def _slowest(operation: Callable[[], object]) -> float:
    dist.barrier()
    start = perf_counter()
    operation()
    seconds = torch.tensor(perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _candidates() -> dict[str, Candidate]:
    """Each with planners that it keeps."""
    our_planner, own_planner, cached = vescale_ckpt.SavePlanner(), vescale_ckpt.SavePlanner(), stock_planner()
    our_load_planner = vescale_ckpt.LoadPlanner()
    return {
        "dcp.save / dcp.load, ours": Candidate(
            lambda state, path: dcp_save(state, storage_writer=vescale_ckpt.StorageWriter(path), planner=our_planner),
            lambda state, path: dcp_load(
                state, storage_reader=vescale_ckpt.StorageReader(path), planner=our_load_planner
            ),
        ),
        "vescale_ckpt.save": Candidate(lambda state, path: vescale_ckpt.save(path, state, planner=own_planner)),
        STOCK: Candidate(
            lambda state, path: dcp_save(
                state, storage_writer=FileSystemWriter(path, sync_files=False), planner=cached
            ),
            lambda state, path: dcp_load(state, storage_reader=FileSystemReader(path)),
        ),
    }
