"""Our safetensors functions beside the library's: ``python -m benchmarks.safetensors``.

Saves and cold loads of a Llama-like state and of 16,384 small tensors; then saves of one tensor by everything that
writes one. Arguments are those of ``python -m benchmarks``, behind these.
"""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

OURS = "vescale-safetensors"
STATES = ("--state", "llama,small", "--baseline", "safetensors",
          "--candidates", f"ceiling,{OURS},{OURS}-noverify,safetensors,numpy,torch")  # fmt: skip
ONE_TENSOR = ("--state", "one", "--ops", "save", "--baseline", "safetensors",
              "--candidates", f"ceiling,{OURS},safetensors,safetensors-memory,numpy,numpy-save,torch")  # fmt: skip

if __name__ == "__main__":
    sys.exit(max(main([*preset, *sys.argv[1:]]) for preset in (STATES, ONE_TENSOR)))
