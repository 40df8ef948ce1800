"""A DCP checkpoint becomes safetensors: ``python -m benchmarks convert --gib 2 --rounds 5``.

A Llama-like state in bfloat16 as it is, and one in float32 that becomes bfloat16. The ceiling reads as many bytes as
the conversion does and writes as many as it does, both at once, with direct I/O and nothing else around it. The rival
is what takes the place of a conversion elsewhere: load all of it, cast, and save it with the safetensors library.
Conversions begin with cold files; every result is compared bit for bit. Rates are of bytes read and written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import safetensors.torch as library
import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt
from benchmarks import command, states
from benchmarks.command import Alternate
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import CEILING, STOCK, Sample, Steps, Turn
from benchmarks.harness.raw_file import RawFile
from benchmarks.harness.room import WrongContentsError
from benchmarks.harness.saves_and_loads import sync
from benchmarks.harness.usage import measure, settle


class Case:
    """One checkpoint, and everything that reads it and writes something."""

    def __init__(self, directory: Path, gib: float, stored: torch.dtype, made: torch.dtype) -> None:
        directory.mkdir()
        self.name = f"{str(stored)[6:]} to {str(made)[6:]}"
        self._directory = directory
        self._made = made
        shapes = states.shapes_of("llama", gib * torch.bfloat16.itemsize / stored.itemsize)
        generator = torch.Generator().manual_seed(0)
        self._state = {name: torch.empty(shape, dtype=stored) for name, shape in shapes.items()}
        for tensor in self._state.values():
            tensor.normal_(generator=generator)
        self._source = directory / "source"
        vescale_ckpt.save(self._source, self._state)
        self._read_bytes = sum(tensor.nbytes for tensor in self._state.values())
        self._write_bytes = self._read_bytes // stored.itemsize * made.itemsize
        self._target = directory / "made.safetensors"
        self._reading, self._writing = RawFile(), RawFile()
        for folder in ("raw", "out"):
            (directory / folder).mkdir()
        self._reading.write(directory / "raw", self._read_bytes)

    def turns(self) -> dict[str, Turn]:
        ways = {CEILING: self._raw, "convert": self._convert, STOCK: self._load_and_save}
        return {name: partial(self._turn, way) for name, way in ways.items()}

    def _raw(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            read = pool.submit(self._reading.read, self._directory / "raw", self._read_bytes)
            written = pool.submit(self._writing.write, self._directory / "out", self._write_bytes)
            read.result()
            written.result()

    def _convert(self) -> None:
        vescale_ckpt.convert(self._source, self._target, format="safetensors", dtype=self._made)

    def _load_and_save(self) -> None:
        loaded = {name: torch.empty_like(tensor) for name, tensor in self._state.items()}
        dcp.load(loaded, checkpoint_id=str(self._source))
        library.save_file({name: tensor.to(self._made) for name, tensor in loaded.items()}, self._target)
        sync(self._target)

    def _turn(self, way: Callable[[], None]) -> Steps:
        settle(self._directory)
        resident = page_cache.prepare(self._directory, warm=False)
        usage = measure(way)
        if self._target.exists():
            self._check()
        for made in (self._target, self._directory / "out" / "ceiling.bin"):
            made.unlink(missing_ok=True)
        moved = self._read_bytes + self._write_bytes
        return {"convert": dataclasses.replace(usage, state_bytes=moved, resident=resident)}

    def _check(self) -> None:
        found = library.load_file(self._target)
        wrong = [name for name, tensor in self._state.items() if not torch.equal(found[name], tensor.to(self._made))]
        if wrong or found.keys() != self._state.keys():
            raise WrongContentsError(f"{self.name}: other contents than converted: {wrong[:3]}")


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = command.parser("benchmarks convert", __doc__)
    add = parser.add_argument
    add("--gib", type=command.size, default=1.0, help="of the checkpoint that is read (default %(default)s)")
    options = parser.parse_args(arguments)

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        for stored in (torch.bfloat16, torch.float32):
            case = Case(directory / str(stored), options.gib, stored, torch.bfloat16)
            yield from alternate(case.name, case.turns())

    return command.run(options, measured)
