"""Our safetensors functions beside the library's: ``python -m benchmarks.safetensors``.

Saves and cold loads of a Llama-like state and of 16,384 small tensors; then saves of one tensor by everything that
writes one. Arguments are those of ``python -m benchmarks``, behind these.
"""

from __future__ import annotations

import sys

from benchmarks.__main__ import main as benchmark
from benchmarks.harness import start

OURS = "vescale-safetensors"
STATES = ("--state", "llama,small", "--baseline", "safetensors",
          "--candidates", f"ceiling,unavoidable-new,{OURS},{OURS}-noverify,safetensors,numpy,torch")  # fmt: skip
ONE_TENSOR = ("--state", "one", "--ops", "save", "--baseline", "safetensors",
              "--candidates", f"ceiling,{OURS},safetensors,safetensors-memory,numpy,numpy-save,torch")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs both tables, with these arguments behind their own, and returns the exit status."""
    more = sys.argv[1:] if arguments is None else arguments
    return max(benchmark([*preset, *more]) for preset in (STATES, ONE_TENSOR))


if __name__ == "__main__":
    start(main)
