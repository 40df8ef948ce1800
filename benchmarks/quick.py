"""How fast is it here? Saves and loads of one process, in half a minute: ``python -m benchmarks quick DIR``.

The candidates alternate, each save is timed until it is durable, and each load is cold where files can be dropped from
memory, goes to the device that the tensors came from, and is compared bit for bit. On a GPU, if there is one.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import states
from benchmarks.candidates import REGISTRY
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import CEILING, GiB, Row, Sample, aligned, alternate, summarize
from benchmarks.harness.raw_file import RawFile
from benchmarks.harness.room import check_room, working_folder
from benchmarks.harness.saves_and_loads import Disk, SavesAndLoads
from benchmarks.harness.usage import measure
from vescale_ckpt.errors import CheckpointError

SECONDS = 30.0
MOST_GIB = 0.5
_PROBE = 2**27  # bytes
_ROUND = 0.3  # seconds of raw writes in a round; all candidates together take about 30 times as long
_BAR = 30  # characters of the fastest

#: What users know each candidate by.
NAMES = {
    CEILING: "raw file, direct I/O",
    "vescale-functions": "vescale_ckpt.save, load",
    "dcp-4": "dcp.save, dcp.load (stock)",
    "torch": "torch.save, torch.load",
    "vescale-safetensors": "vescale_ckpt.safetensors",
    "safetensors": "safetensors library",
}


def _gib_for(folder: Path) -> float:
    """A state of which all candidates can be measured several times. Raises `CheckpointError` if there is no room."""
    check_room(folder, 2 * _PROBE, 8 * _PROBE)
    file = RawFile()
    seconds = min(measure(partial(file.write, folder, _PROBE)).seconds for _ in range(2))
    gib = min(MOST_GIB, max(_PROBE / GiB, _PROBE / seconds * _ROUND / GiB))
    check_room(folder, int(1.1 * gib * GiB), int(4 * gib * GiB))
    return gib


def _samples(folder: Path, device: str, gib: float) -> Iterator[Sample]:
    warm = page_cache.file_system_of(folder) in page_cache.MEMORY_FILE_SYSTEMS
    both = SavesAndLoads(
        states.shapes_of("llama", gib), Disk(folder, partial(page_cache.prepare, warm=warm)), device=device
    )
    turns = {name: partial(both.turn, name, REGISTRY[name].make(warm)) for name in NAMES}
    end, last = time.monotonic() + SECONDS, ([*NAMES][-1], "load")
    for sample in alternate("", turns, sys.maxsize, warmup=1):
        yield sample
        if sample.round >= 0 and (sample.candidate, sample.step) == last and time.monotonic() >= end:
            return


def _picture(rows: Sequence[Row], step: str) -> str:
    shown = [row for row in rows if row.step == step]
    rates = [row.rate or 0.0 for row in shown]
    lines = [
        [NAMES[row.candidate], f"{rate:.2f} GB/s", f"{row.seconds:.2f} s", "█" * round(_BAR * rate / max(rates))]
        for row, rate in zip(shown, rates, strict=True)
    ]
    return f"{step}\n{aligned(lines, (0, 3))}"


def main(arguments: list[str]) -> int:
    """Measures in the folder that `arguments` name. Returns the exit status."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(f"usage: python -m benchmarks quick DIR\n\n{__doc__}", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    warnings.filterwarnings("ignore")  # of DCP without a process group
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with working_folder(Path(arguments[0])) as folder:
            gib = _gib_for(folder)
            print(f"{gib:.2f} GiB in 164 tensors on {device}, {arguments[0]} ({page_cache.file_system_of(folder)}) ...")
            rows = summarize(_samples(folder, device, gib))
    except CheckpointError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    print(f"median of {max(len(row.rounds) for row in rows)}; each save until it is durable\n")
    print("\n\n".join(_picture(rows, step) for step in ("save", "load")))
    return 0
