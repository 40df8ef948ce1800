"""The command line: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import cache, report, rounds, states
from benchmarks.candidates import REGISTRY

DESCRIPTION = """\
Run checkpointing candidates against each other, alternated in random order in every round. Saves are timed
until they are durable. Loads go into tensors in place, cold unless --warm, and every load is compared bit for
bit. Judge by the ratios: absolute rates drift, and a virtual disk may be cached by its host."""

DEFAULT_CANDIDATES = ("ceiling", "vescale", "dcp-1", "dcp-4", "torch", "numpy", "safetensors")


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of lists with commas, of names that are all ``known``."""
    choices = list(known)

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names or not set(names) <= set(choices):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(choices)}")
        return names

    return parse


def _parser() -> argparse.ArgumentParser:
    candidates = "\n".join(f"  {name:<28} {entry.summary}" for name, entry in REGISTRY.items())
    kinds = "\n".join(f"  {name:<28} {kind.summary}" for name, kind in states.KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        epilog=f"candidates:\n{candidates}\n\nstates:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--candidates", type=_names(REGISTRY), default=list(DEFAULT_CANDIDATES), metavar="A,B,…",
        help=f"what to compare (default {','.join(DEFAULT_CANDIDATES)})")  # fmt: skip
    add("--state", type=_names(states.KINDS), default=["llama"], metavar="A,B,…",
        help="what to save (default llama)")  # fmt: skip
    add("--gib", type=float, metavar="N", help="size of the state in GiB (default: the state's own)")
    add("--dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR",
        help="where to save: a disk, or memory such as /dev/shm (default %(default)s)")  # fmt: skip
    add("--ops", type=_names(("save", "load")), default=["save", "load"], metavar="save,load",
        help="what to time (default both)")  # fmt: skip
    add("--rounds", type=int, default=5, metavar="N", help="counted rounds (default %(default)s)")
    add("--warmup", type=int, default=1, metavar="N",
        help="rounds before them, reported as first but not counted (default %(default)s)")  # fmt: skip
    add("--warm", action="store_true", help="load from the page cache instead of from the disk")
    add("--baseline", choices=list(REGISTRY), metavar="NAME",
        help="what the second ratio is to (default dcp-4, or the first but the ceiling)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of contents and order (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    return parser


def _baseline(candidates: list[str]) -> str:
    rivals = [name for name in candidates if name != report.CEILING] or candidates
    return "dcp-4" if "dcp-4" in rivals else rivals[0]


def main(arguments: list[str] | None = None) -> int:
    """Run what ``arguments`` ask for and return the exit status: 1 where nothing could be trusted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.warmup < 0 or (options.gib is not None and options.gib <= 0):
        parser.error("--rounds and --gib must be positive, --warmup not negative")
    baseline = options.baseline or _baseline(options.candidates)
    if baseline not in options.candidates:
        parser.error(f"--baseline {baseline} is not among the candidates")
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is not a directory")

    shapes = {kind: states.shapes_of(kind, options.gib) for kind in options.state}
    file_system = cache.file_system_of(options.dir)
    about = report.machine(options.dir, file_system)
    plan = rounds.Plan(options.rounds, options.warmup, frozenset(options.ops), options.warm, options.seed)

    samples: list[rounds.Sample] = []
    failure: str | None = None
    try:
        for kind in options.state:
            rounds.check_room(options.dir, states.bytes_in(shapes[kind]), len(shapes[kind]))
        candidates = {name: REGISTRY[name].make(options.warm) for name in options.candidates}
        with rounds.working_directory(options.dir) as directory:
            for kind in options.state:
                print(_announcement(kind, shapes[kind]), flush=True)
                for of_round in rounds.Runner(kind, shapes[kind], plan, directory).run(candidates):
                    samples += of_round
    except (rounds.NoRoomError, rounds.WrongContentsError, ImportError) as error:
        failure = str(error)
    finally:
        disk = not options.warm and file_system not in cache.MEMORY_FILE_SYSTEMS
        rows = report.summarize(samples, options.candidates, baseline, disk=disk)
        if rows:
            print(f"\n{report.table(rows, baseline)}\n\n{_footnote(about, options.warm, samples)}")
        if options.json:
            settings = {**vars(options), "baseline": baseline}
            report.write_json(options.json, about, settings, rows, samples)

    if failure is None and not rows:
        failure = "no round could be counted"
    if failure is not None:
        print(f"benchmark failed: {failure}", file=sys.stderr)
        return 1
    return 0


def _announcement(kind: str, shapes: states.Shapes) -> str:
    return f"{kind}: {len(shapes):,} tensors, {states.bytes_in(shapes) / states.GIB:.3f} GiB"


def _footnote(about: dict[str, object], warm: bool, samples: list[rounds.Sample]) -> str:
    residents = [sample.resident for sample in samples if sample.resident is not None]
    if about["file_system"] in cache.MEMORY_FILE_SYSTEMS:
        loads = "files in memory: loads are warm, nothing is durable, and direct I/O is a copy"
    elif warm:
        loads = f"loads warm, at least {min(residents, default=0):.1%} in the page cache before each"
    else:
        loads = f"loads cold, at most {max(residents, default=0):.2%} in the page cache before each"
    described = ", ".join(f"{name} {value}" for name, value in about.items())
    return f"{loads}\n{described}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that directories are removed
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
