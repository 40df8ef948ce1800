"""The command line: ``python -m benchmarks.loading``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import cache, report, rounds
from benchmarks.loading import cases, results
from benchmarks.loading.candidates import MODES, WRITERS
from benchmarks.loading.cases import Case
from benchmarks.loading.ranks import LOOPBACK, ONE_NODE, RankFailedError, ranks_on
from benchmarks.loading.storage import UnavailableError, storage_limit
from benchmarks.loading.trial import Plan, Sample, Trial
from benchmarks.measure import available_memory
from benchmarks.timing import STOCK

DESCRIPTION = """\
Loads by several ranks, the ways to do it alternated in random order in every round: seconds of the slowest rank,
bytes read over bytes needed, peak memory of a rank. Loads go into tensors in place, cold unless --warm, and every
tensor of every load is compared bit for bit. Judge by the ratios of one round; a virtual disk may be cached by its
host, and answers the second reader from there: --throttle is one limit for all ranks together, as shared storage
has it. Limits of storage and network need root (control groups; network namespaces, ip and tc)."""

TABLES = ("cases", "crossover", "stacked", "ranks")
EPILOG = """\
tables:
  cases                  every candidate at every case on --ranks ranks
  crossover              where it pays to read for each other: 2, 4 and 8 ranks (--worlds), --throttle 0,150,300,600,
                         --network node,loopback, 128 MiB of the first case (or those of --cases) unless told otherwise
  stacked                stacked layers over the same layers apart, saved by 1 rank, loaded along each dimension
  ranks                  one checkpoint, loaded by 1, 2, 4 and 8 ranks (--worlds), in shards of rows and whole"""

Job = tuple[int, list[Case]]  # so many ranks, what they load


def _parser() -> argparse.ArgumentParser:
    modes = "\n".join(f"  {name:<22} {summary}" for name, (summary, _) in MODES.items())
    known = "\n".join(f"  {name:<22} {summary}" for name, summary in cases.NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loading",
        description=DESCRIPTION,
        epilog=f"{EPILOG}\n\ncases:\n{known}\n\ncandidates:\n{modes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--table", choices=TABLES, default="cases", help="what to find out (default %(default)s)")
    add(
        "--cases",
        type=_listed(_one_of(cases.NAMES)),
        metavar="A,B,…",
        help="(default replicated,rows-to-columns,stacked)",
    )
    add("--modes", type=_listed(_one_of(MODES)), metavar="A,B,…", help=f"candidates (default auto,true,false,{STOCK})")
    add("--ranks", type=_positive, default=4, metavar="N", help="processes that load (default %(default)s)")
    add("--worlds", type=_listed(_positive), metavar="N,N,…", help="numbers of ranks for the tables that want several")
    add("--mib", type=float, metavar="N", help="size of the state in MiB (default 600, crossover 128)")
    add("--rounds", type=int, default=5, metavar="N", help="counted rounds (default %(default)s)")
    add("--warmup", type=int, default=1, metavar="N", help="rounds before them (default %(default)s)")
    add("--throttle", type=_listed(_rate), metavar="N,N,…", help="storage in MB/s; 0: as fast as it is (default 0)")
    add("--network", type=_listed(_network), metavar="A,B,…",
        help="node: all ranks on one; loopback: each on its own; N: with cards of N MB/s (default node)")  # fmt: skip
    add("--written-by", choices=list(WRITERS), default="vescale", help="whose checkpoint (default %(default)s)")
    add("--warm", action="store_true", help="load from the page cache")
    add("--dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="where (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of contents and order (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    return parser


def _listed(parse: Callable[[str], object]) -> Callable[[str], list[object]]:
    return lambda text: list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def _one_of(known: Iterable[str]) -> Callable[[str], str]:
    names = list(known)

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is wanted")
    return int(text)


def _rate(text: str) -> int | None:
    return None if text == "0" else _positive(text)


def _network(text: str) -> str:
    return {"node": ONE_NODE, "loopback": LOOPBACK}.get(text) or str(_positive(text))


def _complete(options: argparse.Namespace) -> None:
    """What was not said, as the table wants it."""
    crossing = options.table == "crossover"
    options.cases = options.cases or (["replicated"] if crossing else ["replicated", "rows-to-columns", "stacked"])
    options.modes = options.modes or (["auto", "true", "false"] if crossing else ["auto", "true", "false", STOCK])
    options.worlds = options.worlds or ([2, 4, 8] if crossing else [1, 2, 4, 8])
    options.throttle = options.throttle or ([None, 150, 300, 600] if crossing else [None])
    options.network = options.network or ([ONE_NODE, LOOPBACK] if crossing else [ONE_NODE])
    options.mib = options.mib or (128 if crossing else 600)


def _jobs(options: argparse.Namespace) -> list[Job]:
    if options.table == "stacked":
        return [(options.ranks, [case for pair in _pairs(options) for case in pair])]
    if options.table == "ranks":
        return [(size, cases.for_any_ranks(options.mib)) for size in options.worlds]
    sizes = options.worlds if options.table == "crossover" else [options.ranks]
    return [(size, [cases.case(name, options.mib) for name in options.cases]) for size in sizes]


def _pairs(options: argparse.Namespace) -> list[tuple[Case, Case]]:
    return [cases.stacked_and_twin(options.mib, dim) for dim in range(3)]


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status: 1 where something could not be measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.warmup < 0 or (options.mib is not None and options.mib <= 0):
        parser.error("--rounds and --mib must be positive, --warmup not negative")
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is not a directory")
    _complete(options)
    about = report.machine(options.dir, cache.file_system_of(options.dir))
    plan = Plan(options.modes, options.rounds, options.warmup, options.seed, options.warm, options.written_by)
    jobs = _jobs(options)

    samples: list[Sample] = []
    failure: str | None = None
    try:
        for size, wanted in jobs:
            _check_room(options.dir, size, wanted, options.network)
        with rounds.working_directory(options.dir) as directory:
            for size, wanted in jobs:
                for network in options.network:
                    _run(size, wanted, network, options.throttle, directory, plan, samples)
    except (rounds.NoRoomError, rounds.WrongContentsError, RankFailedError) as error:
        failure = str(error)
    finally:  # also what was measured before somebody lost patience
        rows = results.summarize(samples)
        if rows:
            print(f"\n{_table(options, rows)}\n\n{_footnote(about, options.warm, samples)}")
        if options.json:
            _write(options, about, rows, samples)
    if failure is None and not rows:
        failure = "no round could be counted"
    if failure is not None:
        print(f"benchmark failed: {failure}", file=sys.stderr)
        return 1
    return 0


def _run(
    size: int,
    wanted: Sequence[Case],
    network: str,
    storages: Sequence[int | None],
    directory: Path,
    plan: Plan,
    samples: list[Sample],
) -> None:
    """Adds to ``samples``. What this machine cannot limit is left out, with a line that says why."""
    with contextlib.ExitStack() as stack:
        limit = None
        if any(storage is not None for storage in storages):
            try:
                limit = stack.enter_context(storage_limit(directory))
            except UnavailableError as error:
                print(f"left out: storage of {_named(storages)} MB/s: {error}", file=sys.stderr)
                storages = [storage for storage in storages if storage is None]
        try:
            ranks = stack.enter_context(ranks_on(size, network))
        except UnavailableError as error:
            print(f"left out: network of {network} MB/s: {error}", file=sys.stderr)
            return
        if limit is not None:
            limit.add(ranks.pids)
        trial = Trial(ranks, network, limit, directory, plan)
        for case in wanted:
            start = len(samples)
            for sample in trial.run(case, storages):
                samples.append(sample)
            told = f"{case.name} on {size} ranks, {network}: {len(samples) - start} loads"
            print(told, file=sys.stderr, flush=True)


def _named(storages: Iterable[int | None]) -> str:
    return ", ".join(str(storage) for storage in storages if storage is not None)


def _check_room(directory: Path, size: int, wanted: Sequence[Case], networks: Sequence[str]) -> None:
    """Raises NoRoomError unless copies for all nodes fit the disk, and the state and what ranks hold the memory."""
    copies = 1 if set(networks) == {ONE_NODE} else size
    disk = shutil.disk_usage(directory).free
    memory = available_memory()
    for case in wanted:
        whole = case.loaded.dim is None and not case.loaded.dealt
        on_disk = int(1.05 * copies * case.bytes) + 64 * 2**20
        in_memory = case.bytes * (1 + (size if whole else 2)) + size * 512 * 2**20
        for need, free, what in ((on_disk, disk, directory), (in_memory, memory, "the memory")):
            if free < need:
                text = f"{case.name} on {size} ranks: {what} has {free:,} bytes free; this run may need {need:,}"
                raise rounds.NoRoomError(text)


def _table(options: argparse.Namespace, rows: Sequence[results.Row]) -> str:
    if options.table == "crossover":
        return results.crossover(rows)
    if options.table == "stacked":
        return results.twins(rows, ((first.name, second.name) for first, second in _pairs(options)))
    if options.table == "ranks":
        return results.by_ranks(rows)
    return results.details(rows)


def _footnote(about: dict[str, object], warm: bool, samples: Sequence[Sample]) -> str:
    residents = [sample.resident for sample in samples]
    if about["file_system"] in cache.MEMORY_FILE_SYSTEMS:
        loads = "files in memory: loads are warm"
    elif warm:
        loads = f"loads warm, at least {min(residents):.1%} in the page cache before each"
    else:
        loads = f"loads cold, at most {max(residents):.2%} in the page cache before each"
    return f"{loads}\n" + ", ".join(f"{name} {value}" for name, value in about.items())


def _write(
    options: argparse.Namespace, about: dict[str, object], rows: Sequence[results.Row], samples: Sequence[Sample]
) -> None:
    content = {
        "machine": about,
        "settings": vars(options),
        "rows": [dataclasses.asdict(row) for row in rows],
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    options.json.write_text(json.dumps(content, indent=1, default=str) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that what was made is removed
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
