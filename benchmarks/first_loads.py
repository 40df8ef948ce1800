"""The first load of a safetensors file in a process: ``python -m benchmarks first_loads --gib 0.5``.

Each load is that of a new process, because memory costs most where it is touched for the first time. ``load`` is the
call, ``load and copy`` also copies all tensors to memory that the caller has. On a virtual machine it counts what the
host has done with unused memory: the process has slept for ``--idle`` seconds, so that the host could take memory back,
or has just touched ``--touch`` GiB, which the host then has. The stock is the safetensors library, which maps the file.
fastsafetensors takes part where it is installed. All must load the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import safetensors.torch as library
import torch

from benchmarks import command
from benchmarks.command import Alternate
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import STOCK, Sample, Steps
from benchmarks.harness.room import WrongContentsError
from benchmarks.harness.usage import Usage, settle
from vescale_ckpt import safetensors

Tensors = dict[str, torch.Tensor]
_BOUND = 300.0  # seconds for one process
_TENSOR_BYTES = {"large": 16 << 20, "small": 64 << 10}


def load_fastsafetensors(*paths: str) -> Tensors:
    with import_module("fastsafetensors").fastsafe_open(filenames=[*paths], nogds=True, device="cpu") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


#: Name of a way → the package that it needs, and the load.
WAYS: dict[str, tuple[str, Callable[[str], Tensors]]] = {
    "vescale": ("vescale_ckpt", safetensors.load_file),
    "not verified": ("vescale_ckpt", partial(safetensors.load_file, verify=False)),
    STOCK: ("safetensors", library.load_file),
    "fastsafetensors": ("fastsafetensors", load_fastsafetensors),
}


def load_here(way: str, path: str, idle: float, touch: int) -> None:
    """What a new process does. Prints seconds and processor seconds of the load and with the copy, and a checksum."""
    package, load = WAYS[way]
    import_module(package)
    with library.safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        targets = {key: torch.zeros(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    if touch:
        torch.zeros(touch // 4).fill_(1)
    time.sleep(idle)
    began, cpu = time.perf_counter(), time.process_time()
    loaded = load(path)
    after, cpu_after = time.perf_counter(), time.process_time()
    for key, target in targets.items():
        target.copy_(loaded[key])
    end, cpu_end = time.perf_counter(), time.process_time()
    print(json.dumps([[after - began, cpu_after - cpu], [end - began, cpu_end - cpu], _checksum(targets)]))


def _checksum(tensors: Tensors) -> int:
    found = 0
    for key in sorted(tensors):
        found = zlib.crc32(memoryview(tensors[key].numpy()).cast("B"), found)  # type: ignore[arg-type]
    return found


def _turn(way: str, path: Path, expected: int, warm: bool, idle: float, touch: int) -> Steps:
    page_cache.prepare(path.parent, warm=warm)
    program = f"from benchmarks.first_loads import load_here; load_here({way!r}, {str(path)!r}, {idle}, {touch})"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=_BOUND)
    if child.returncode != 0:
        raise RuntimeError(f"{way}: {child.stderr.strip().splitlines()[-1:]}")
    load, copy, found = json.loads(child.stdout.splitlines()[-1])
    if found != expected:
        raise WrongContentsError(f"{way} loaded other bytes than were saved")
    size = path.stat().st_size
    return {
        name: Usage(seconds, cpu, state_bytes=size)
        for name, (seconds, cpu) in (("load", load), ("load and copy", copy))
    }


def _samples(options: argparse.Namespace, directory: Path, alternate: Alternate) -> Iterator[Sample]:
    ways = [way for way, (package, _) in WAYS.items() if importlib.util.find_spec(package) is not None]
    for kind in options.state:
        size = _TENSOR_BYTES[kind]
        count = max(1, int(options.gib * 2**30) // size)
        path = directory / kind / "model.safetensors"
        path.parent.mkdir()
        generator = torch.Generator().manual_seed(0)
        state = {f"{number:06}": torch.randn(size // 4, generator=generator) for number in range(count)}
        safetensors.save_file(state, path)
        expected = _checksum(state)
        del state
        settle(path.parent)
        before = (("idle", options.idle, 0), ("touched", 0.0, int(options.touch * 2**30)))
        for place, warm in (("disk", False), ("page cache", True)):
            for name, idle, touch in before:
                turns = {way: partial(_turn, way, path, expected, warm, idle, touch) for way in ways}
                yield from alternate(f"{kind} tensors from the {place}, {name} before", turns)


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("benchmarks first_loads", __doc__)
    parser.add_argument("--gib", type=command.size, default=0.5, help="size of the file (default %(default)s)")
    parser.add_argument(
        "--state", type=command.listed(command.one_of(_TENSOR_BYTES)), default=["large"], metavar="KIND,...",
        help=f"of {', '.join(_TENSOR_BYTES)} (default large)",
    )  # fmt: skip
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of sleep before a load (default %(default)s)")
    parser.add_argument("--touch", type=float, default=3.0, help="GiB to touch before a load (default %(default)s)")
    options = parser.parse_args(arguments)
    return command.run(options, lambda directory, alternate: _samples(options, directory, alternate))
