"""Runs the commands of `vescale-ckpt` (or `python -m vescale_ckpt`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace

from .._version import VERSION
from .commands import COMMANDS
from .output import FOUND, UNUSABLE, clean
from .spec import Command

_PROGRAM = "vescale-ckpt"
_ABOUT = (
    "Look into, check, convert and tidy checkpoints of PyTorch jobs. "
    "Exit status: 0 fine, 1 damage or a difference, 2 unusable."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    try:
        from .typer_front import run
    except ImportError:
        from .argparse_front import run
    try:
        return run(_PROGRAM, _ABOUT, VERSION, COMMANDS, _call)(arguments)
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _call(command: Command, options: SimpleNamespace) -> int:
    """Runs a command. An expected error becomes one line and an exit status."""
    from ..errors import CheckpointError, CorruptCheckpointError

    try:
        status = command.function()(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, MemoryError, CheckpointError) as error:
        print(f"{_PROGRAM} {command.name}: {clean(str(error) or type(error).__name__)}", file=sys.stderr)
        return FOUND if isinstance(error, CorruptCheckpointError) else UNUSABLE
