"""What loads by several ranks are measured for, and by which tables."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import command
from benchmarks.command import Alternate, listed, one_of, positive
from benchmarks.harness.by_turns import STOCK, Sample
from benchmarks.harness.room import check_room
from benchmarks.loading import cases, loads
from benchmarks.loading.cases import Case
from benchmarks.loading.loads import LIMIT, MODES
from benchmarks.ranks import LOOPBACK, ONE_NODE, ranks_on
from benchmarks.storage import UnavailableError, storage_limit

DESCRIPTION = """\
Loads by several ranks, the ways to do it alternated in random order in every round: seconds of the slowest rank,
bytes read over bytes needed, peak memory of a rank. Loads go into tensors in place, cold, and every tensor
of every load is compared bit for bit. Judge by the ratios of one round; a virtual disk may be cached by its
host, and answers the second reader from there: --throttle is one limit for all ranks together, as shared storage
has it. Limits of storage and network need root (control groups; network namespaces, ip and tc)."""

EPILOG = """\
tables:
  cases                  every candidate at every case on 4 ranks
  crossover              where it pays to read for each other: 2, 4 and 8 ranks, --throttle 0,150,300,600,
                         --network node,loopback, 128 MiB of the first case
  stacked                stacked layers and the same layers apart, saved by 1 rank, loaded along each dimension
  ranks                  one checkpoint, loaded by 1, 2, 4 and 8 ranks, in shards of rows and whole"""

# What is run unless told otherwise, by table.
_CASES = ["replicated", "rows-to-columns", "stacked"]
_DEFAULTS: dict[str, dict[str, object]] = {
    "cases": {"cases": _CASES, "ranks": [4]},
    "crossover": {
        "cases": ["replicated"], "ranks": [2, 4, 8], "modes": ["auto", "true", "false"], "mib": 128,
        "throttle": [None, 150, 300, 600], "network": [ONE_NODE, LOOPBACK],
    },
    "stacked": {"ranks": [4]},
    "ranks": {"ranks": [1, 2, 4, 8]},
}  # fmt: skip
_COMMON: dict[str, object] = {
    "modes": ["auto", "true", "false", STOCK], "mib": 600, "throttle": [None], "network": [ONE_NODE]
}  # fmt: skip


def _rate(text: str) -> int | None:
    return None if text == "0" else positive(text)


def _network(text: str) -> str:
    return {"node": ONE_NODE, "loopback": LOOPBACK}.get(text) or str(positive(text))


def _parser() -> argparse.ArgumentParser:
    summaries = {name: summary for name, (summary, _) in MODES.items()}
    summaries[LIMIT] = "one node: each byte read once by direct I/O, and copied to the ranks; nothing else"
    modes = "\n".join(f"  {name:<22} {summary}" for name, summary in summaries.items())
    known = "\n".join(f"  {name:<22} {summary}" for name, summary in cases.SUMMARIES.items())
    epilog = f"{EPILOG}\n\ncases:\n{known}\n\ncandidates:\n{modes}"
    parser = command.parser("benchmarks loading", DESCRIPTION, epilog)
    add = parser.add_argument
    add("--table", choices=list(_DEFAULTS), default="cases", help="what to find out (default %(default)s)")
    add("--cases", type=listed(one_of(cases.KINDS)), metavar="A,B,…", help=f"(default {','.join(_CASES)})")
    add(
        "--modes",
        type=listed(one_of([*MODES, LIMIT])),
        metavar="A,B,…",
        help=f"candidates (default auto,true,false,{STOCK})",
    )
    add("--ranks", type=listed(positive), metavar="N,N,…", help="processes that load (default: as the table says)")
    add("--mib", type=command.size, metavar="N", help="size of the state in MiB (default 600, crossover 128)")
    add("--throttle", type=listed(_rate), metavar="N,N,…", help="storage in MB/s; 0: as fast as it is (default 0)")
    add("--network", type=listed(_network), metavar="A,B,…",
        help="node: all ranks on one; loopback: each on its own; N: with cards of N MB/s (default node)")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status: 1 where something could not be measured."""
    options = _parser().parse_args(arguments)
    for name, value in {**_COMMON, **_DEFAULTS[options.table]}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return command.run(options, partial(_samples, options))


def _samples(options: argparse.Namespace, directory: Path, alternate: Alternate) -> Iterator[Sample]:
    wanted = cases.of_table(options.table, options.cases, options.mib)
    for size in options.ranks:
        for case in wanted:
            _check_room(directory, size, case, options.network)
    for size in options.ranks:
        for network in options.network:
            yield from _on_ranks(size, wanted, network, directory, alternate, options)


def _on_ranks(
    size: int,
    wanted: Sequence[Case],
    network: str,
    directory: Path,
    alternate: Alternate,
    options: argparse.Namespace,
) -> Iterator[Sample]:
    """What this machine cannot limit is left out, with a line that says why."""
    storages = options.throttle
    with contextlib.ExitStack() as stack:
        limit = None
        try:
            if any(storages):
                limit = stack.enter_context(storage_limit(directory))
        except UnavailableError as error:
            print(f"left out: storage of {storages} MB/s: {error}", file=sys.stderr)
            storages = [storage for storage in storages if storage is None]
        try:
            ranks = stack.enter_context(ranks_on(size, network))
        except UnavailableError as error:
            print(f"left out: network of {network} MB/s: {error}", file=sys.stderr)
            return
        if limit is not None:
            limit.add(ranks.pids)
        for case in wanted:
            with loads.saved(ranks, network, case, directory, options.seed, LIMIT in options.modes):
                for storage in storages:
                    turns = {
                        name: partial(loads.load, ranks, case, directory, name, limit, storage)
                        for name in options.modes
                    }
                    yield from alternate(f"{case.name}: {_place(size, storage, network)}", turns)


def _place(ranks: int, storage: int | None, network: str) -> str:
    speed = "storage as it is" if storage is None else f"storage {storage} MB/s"
    return f"{ranks} ranks, {speed}, {f'{network} MB/s between nodes' if network.isdecimal() else network}"


def _check_room(directory: Path, size: int, case: Case, networks: Sequence[str]) -> None:
    """Copies for all nodes have to fit the disk, and the state and what ranks hold the memory."""
    copies = 1 if set(networks) == {ONE_NODE} else size
    whole = case.loaded.dim is None and not case.loaded.dealt
    in_memory = case.bytes * (1 + (size if whole else 2)) + size * 2**29
    check_room(directory, int(1.05 * copies * case.bytes) + 2**26, in_memory)
