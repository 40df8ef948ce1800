"""Runs the commands of `vescale-ckpt` (or `python -m vescale_ckpt`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace

from .._version import VERSION
from . import help
from .commands import COMMANDS
from .output import FINE, FOUND, UNUSABLE, clean
from .spec import Command

_PROGRAM = "vescale-ckpt"
_COMPLETION = "_VESCALE_CKPT_COMPLETE"  # set by the shell, which asks typer for words
_ABOUT = (
    "Look into, check, convert and tidy checkpoints of PyTorch jobs. "
    "Exit status: 0 fine, 1 damage or a difference, 2 unusable."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if help.wanted(given) and _COMPLETION not in os.environ:
        print(help.text(_PROGRAM, _ABOUT, COMMANDS, given, completion=find_spec("typer") is not None))
        return FINE if given else UNUSABLE
    if given == ["--version"]:
        print(VERSION)
        return FINE
    try:
        from .typer_front import run
    except ImportError:
        from .argparse_front import run
    try:
        return run(_PROGRAM, COMMANDS, _call)(given)
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
