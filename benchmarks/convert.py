"""A DCP checkpoint becomes safetensors: ``python -m benchmarks.convert --gib 2 --rounds 5``.

A Llama-like state in bfloat16 as it is, and one in float32 that becomes bfloat16. The ceiling reads as many bytes as
the conversion does and writes as many as it does, both at once, with direct I/O and nothing else around it. The rival
is what takes the place of a conversion elsewhere: load all of it, cast, and save it with the safetensors library.
Rounds alternate, in random order, from cold files; every result is compared bit for bit in the first of them.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import safetensors.torch as stock
import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt
from benchmarks import cache, states
from benchmarks.ceiling import RawFile
from benchmarks.measure import Usage, measure, settle
from benchmarks.rounds import working_directory

MIB = 2**20


class Case:
    """One checkpoint, and everything that reads it and writes something."""

    def __init__(self, directory: Path, gib: float, stored: torch.dtype, made: torch.dtype) -> None:
        self.name = f"{str(stored)[6:]} to {str(made)[6:]}" if stored != made else str(made)[6:]
        self.directory = directory
        self.made = made
        shapes = states.shapes_of("llama", gib * torch.bfloat16.itemsize / stored.itemsize)
        generator = torch.Generator().manual_seed(0)
        self.state = {name: torch.empty(shape, dtype=stored) for name, shape in shapes.items()}
        for tensor in self.state.values():
            tensor.normal_(generator=generator)
        self.source = directory / "source"
        vescale_ckpt.save(self.source, self.state)
        self.read_bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.write_bytes = self.read_bytes // stored.itemsize * made.itemsize
        self.target = directory / "made.safetensors"
        self._reading, self._writing = RawFile(), RawFile()
        (directory / "raw").mkdir()
        self._reading.write(directory / "raw", self.read_bytes)

    def ceiling(self) -> None:
        (self.directory / "out").mkdir(exist_ok=True)
        with ThreadPoolExecutor(2) as pool:
            read = pool.submit(self._reading.read, self.directory / "raw", self.read_bytes)
            written = pool.submit(self._writing.write, self.directory / "out", self.write_bytes)
            read.result()
            written.result()

    def convert(self) -> None:
        vescale_ckpt.convert(self.source, self.target, format="safetensors", dtype=self.made)

    def load_and_save(self) -> None:
        loaded = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        dcp.load(loaded, checkpoint_id=str(self.source))
        stock.save_file({name: tensor.to(self.made) for name, tensor in loaded.items()}, self.target)
        descriptor = os.open(self.target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def check(self) -> None:
        """Raises ``RuntimeError`` unless the result is right."""
        found = stock.load_file(self.target)
        wrong = [name for name, tensor in self.state.items() if not torch.equal(found[name], tensor.to(self.made))]
        if wrong or found.keys() != self.state.keys():
            raise RuntimeError(f"{self.name}: other contents than converted: {wrong[:3]}")

    def clear(self) -> None:
        self.target.unlink(missing_ok=True)
        shutil.rmtree(self.directory / "out", ignore_errors=True)

    def run(self, operation: Callable[[], None], check: bool) -> Usage:
        self.clear()
        settle()
        cache.drop(self.directory)
        usage = measure(operation)
        if check and self.target.exists():
            self.check()
        self.clear()
        return usage


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of the checkpoint that is read (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the file system to measure")
    parser.add_argument("--without-rival", action="store_true")
    options = parser.parse_args(arguments)
    order = random.Random(0)
    print("case | what | median s | of the ceiling | GB/s read + written | CPU s | peak MiB")
    for stored in (torch.bfloat16, torch.float32):
        with working_directory(options.dir) as directory:
            case = Case(directory, options.gib, stored, torch.bfloat16)
            candidates = {"ceiling": case.ceiling, "convert": case.convert, "load, save_file": case.load_and_save}
            if options.without_rival:
                del candidates["load, save_file"]
            samples: dict[str, list[Usage]] = {name: [] for name in candidates}
            for number in range(options.rounds):
                for name in order.sample(list(candidates), len(candidates)):
                    samples[name].append(case.run(candidates[name], check=number == 0))
            for name, usages in samples.items():
                print(_row(case, name, usages, samples["ceiling"]), flush=True)
    return 0


def _row(case: Case, name: str, usages: list[Usage], ceiling: list[Usage]) -> str:
    seconds = median(usage.seconds for usage in usages)
    ratio = median(best.seconds / usage.seconds for best, usage in zip(ceiling, usages, strict=True))
    moved = (case.read_bytes + case.write_bytes) / seconds / 1e9
    cpu = median(usage.cpu_seconds for usage in usages)
    peak = max(usage.peak_extra_bytes or 0 for usage in usages) / MIB
    return f"{case.name} | {name} | {seconds:.3f} | {ratio:.2f} | {moved:.2f} | {cpu:.2f} | {peak:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
