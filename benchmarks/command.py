"""What all benchmarks can be asked for on the command line, and what they print and write."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.harness.by_turns import STOCK, Sample, Turn, alternate, summarize, table
from benchmarks.harness.page_cache import MEMORY_FILE_SYSTEMS, file_system_of
from benchmarks.harness.room import working_folder
from vescale_ckpt.errors import CheckpointError


class Alternate(Protocol):
    """Runs candidates by turns, as many rounds as the command line says. `more` are options of `by_turns.alternate`."""

    def __call__(self, case: str, candidates: Mapping[str, Turn], **more: Any) -> Iterator[Sample]: ...


def parser(name: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser of what all benchmarks can be asked for."""
    made = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--rounds", type=positive, default=5, metavar="N", help="counted rounds (default %(default)s)")
    add("--warmup", type=int, default=1, metavar="N", help="rounds before them, not counted (default %(default)s)")
    add(
        "--dir",
        type=_directory,
        default=Path(tempfile.gettempdir()),
        metavar="DIR",
        help="where to save (default %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    return made


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def size(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return float(text)


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return Path(text)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of lists with commas."""
    return lambda text: list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    names = list(known)

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def run(
    options: argparse.Namespace,
    measured: Callable[[Path, Alternate], Iterable[Sample]],
    *,
    baseline: str = STOCK,
) -> int:
    """Takes the samples that `measured` yields in an empty directory, prints each case and writes `--json`.

    Returns the exit status: 1 where something could not be measured.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    by_turns = partial(alternate, rounds=options.rounds, warmup=options.warmup)
    about = _machine(options.dir)
    samples: list[Sample] = []
    shown, failure, status = 0, "", 1
    try:
        with working_folder(options.dir) as directory:
            for sample in measured(directory, by_turns):
                if samples and sample.case != samples[-1].case:
                    print(f"{table(summarize(samples[shown:], baseline), baseline)}\n", flush=True)
                    shown = len(samples)
                samples.append(sample)
    except (CheckpointError, ImportError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure, status = "interrupted", 130
    rows = summarize(samples, baseline)
    print(f"{table(summarize(samples[shown:], baseline), baseline)}\n\n{_footnote(about, samples)}")
    if options.json:
        found: dict[str, Any] = {"machine": about, "settings": vars(options)}
        found |= {"rows": [*map(dataclasses.asdict, rows)], "samples": [*map(dataclasses.asdict, samples)]}
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    if not failure and samples and not rows:
        failure = "no round could be counted"
    if failure:
        print(f"benchmark failed: {failure}", file=sys.stderr)
    return status if failure else 0


def _machine(directory: Path) -> dict[str, Any]:
    """What a reader must know of the machine to judge the numbers."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "directory": str(directory),
        "file_system": file_system_of(directory),
        "load_average": os.getloadavg()[0],
    }


def _footnote(about: Mapping[str, Any], samples: Sequence[Sample]) -> str:
    resident = [sample.usage.resident for sample in samples if sample.usage.resident is not None]
    loads = f"{min(resident):.2%} to {max(resident):.2%} in the page cache before loads\n" if resident else ""
    if about["file_system"] in MEMORY_FILE_SYSTEMS:
        loads += "files in memory: loads are warm, nothing is durable, and direct I/O is a copy\n"
    return loads + ", ".join(f"{name} {value}" for name, value in about.items())
