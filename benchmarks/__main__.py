"""The command of all benchmarks: ``python -m benchmarks NAME``, or ``make bench ARGS="NAME …"``."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = {
    "quick": "how fast is it here: saves and loads in one folder, half a minute, no options",
    "saves": "saves and loads of one process, every way that can be compared",
    "loading": "loads by several ranks",
    "first_loads": "the first load of a safetensors file in a process, beside other loaders",
    "background": "asynchronous saves, and what they take from training",
    "export": "exports by several ranks",
    "convert": "a DCP checkpoint becomes safetensors",
    "quantized": "loads of quantised models into bfloat16, and of experts as stacks",
    "nodes": "a folder of each machine: saves, copies on other machines, a lost machine",
    "many_ranks": "what connecting costs each of hundreds of ranks, and the first saves and loads of a job",
    "object_store": "saves to and loads from an S3 server",
    "planning": "who writes and reads what",
}


def main(arguments: list[str]) -> int:
    """Runs one benchmark and returns its exit status."""
    if not arguments or arguments[0] not in BENCHMARKS:
        names = "\n".join(f"  {name:<14} {summary}" for name, summary in BENCHMARKS.items())
        print(f"usage: python -m benchmarks NAME [options]\n\n{names}\n\nNAME --help lists the options")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    status: int = import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
