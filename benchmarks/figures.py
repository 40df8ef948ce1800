"""Figures of a run of scripts/check_gpu.py."""

from __future__ import annotations

import json
import os


def record(**values: object) -> None:
    """Prints figures, and adds them to those of the run, if there is one."""
    line = json.dumps(values, default=str)
    print(line, flush=True)
    if path := os.environ.get("GPU_CHECK_FIGURES"):
        with open(path, "a") as file:
            file.write(line + "\n")
