"""Saves and loads of one process, every candidate against every other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks import command, states
from benchmarks.candidates import FILES, REGISTRY
from benchmarks.command import Alternate
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import CEILING, GiB, Sample
from benchmarks.harness.random_states import bytes_in
from benchmarks.harness.room import check_room, working_folder
from benchmarks.harness.saves_and_loads import Disk, SavesAndLoads

DESCRIPTION = """\
Run checkpointing candidates against each other, alternated in random order in every round. Saves are timed
until they are durable, unless --places has others. Loads go into tensors in place, cold unless --warm, and every
load is compared bit for bit. Judge by the ratios: absolute rates drift, and a virtual disk may be cached by its
host."""

PLACES, MEMORY = ("durable", "as-it-is", "memory"), "/dev/shm"
DEFAULT_CANDIDATES = (CEILING, "vescale", "dcp-1", "dcp-4", "torch", "numpy", "safetensors")


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status: 1 where nothing could be trusted."""
    candidates = "\n".join(f"  {name:<28} {entry.summary}" for name, entry in REGISTRY.items())
    kinds = "\n".join(f"  {name:<28} {kind.summary}" for name, kind in states.KINDS.items())
    parser = command.parser("benchmarks saves", DESCRIPTION, f"candidates:\n{candidates}\n\nstates:\n{kinds}")
    add = parser.add_argument
    add("--candidates", type=command.listed(command.one_of(REGISTRY)), default=list(DEFAULT_CANDIDATES),
        metavar="A,B,…", help=f"what to compare (default {','.join(DEFAULT_CANDIDATES)})")  # fmt: skip
    add("--files", action="store_const", dest="candidates", const=list(FILES),
        help="all candidates that write files which others read")  # fmt: skip
    add("--state", type=command.listed(command.one_of(states.KINDS)), default=["llama"], metavar="A,B,…",
        help="what to save (default llama)")  # fmt: skip
    add("--gib", type=command.size, metavar="N", help="size of the state in GiB (default: the state's own)")
    add("--ops", type=command.listed(command.one_of(("save", "load"))), default=["save", "load"],
        metavar="save,load", help="what to time (default both)")  # fmt: skip
    add("--places", type=command.listed(command.one_of(PLACES)), default=["durable"], metavar="A,B,…",
        help=f"of {', '.join(PLACES)}: saves to --dir until they are durable, to --dir as each candidate leaves them, "
        f"to {MEMORY} (default durable)")  # fmt: skip
    add("--device", default="cpu", help="of the state (default %(default)s)")
    add("--warm", action="store_true", help="load from the page cache instead of from the disk")
    add("--baseline", choices=list(REGISTRY), metavar="NAME",
        help="what the second ratio is to (default dcp-4, or the first but the ceiling)")  # fmt: skip
    options = parser.parse_args(arguments)
    rivals = [name for name in options.candidates if name != CEILING] or options.candidates
    baseline = options.baseline or ("dcp-4" if "dcp-4" in rivals else rivals[0])
    if baseline not in options.candidates:
        parser.error(f"--baseline {baseline} is not among the candidates")

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        shapes = {kind: states.shapes_of(kind, options.gib) for kind in options.state}
        for of_kind in shapes.values():
            size = bytes_in(of_kind)  # a save; the state, the targets, and what a candidate copies
            check_room(directory, int(size * 1.05) + len(of_kind) * 4096 + 2**26, 3 * size + 2**29)
        made = {name: REGISTRY[name].make(options.warm) for name in options.candidates}
        prepare = partial(page_cache.prepare, warm=options.warm)
        with working_folder(Path(MEMORY if "memory" in options.places else directory)) as memory:
            for kind, place in product(shapes, options.places):
                disk = Disk(memory if place == "memory" else directory, prepare, durable=place == "durable")
                both = SavesAndLoads(shapes[kind], disk, options.ops, options.device)
                case = f"{kind}, {len(shapes[kind]):,} tensors, {both.bytes / GiB:.3f} GiB, {options.device}, {place}"
                yield from alternate(case, {name: partial(both.turn, name, made[name]) for name in made})

    return command.run(options, measured, baseline=baseline)
