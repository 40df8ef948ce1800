"""Python imports this at the start of a job of `harness.jobs` that is to be killed. A process that prints the line
of step HALT_AT_STEP halts there, so that no step follows before the kill, however busy the machine is."""

import os
import sys
import time

_LINE = f"step {os.environ['HALT_AT_STEP']} loss "
_write = sys.stdout.write
_seen = False


def _write_and_halt(text: str) -> int:
    global _seen
    written = _write(text)
    _seen = _seen or _LINE in text
    if _seen and text.endswith("\n"):  # `print` writes the end of the line by itself
        sys.stdout.flush()
        time.sleep(600)
    return written


sys.stdout.write = _write_and_halt  # type: ignore[method-assign]
