"""Runs the commands of `vescale-ckpt` (or `python -m vescale_ckpt`)."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from importlib import import_module

from .._version import VERSION
from .commands import COMMANDS, Command
from .output import FINE, FOUND, UNUSABLE, clean

_PROGRAM = "vescale-ckpt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    parser = _parser()
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not given:
            parser.print_help()
            return UNUSABLE
        try:
            options = parser.parse_args(given)
        except SystemExit as end:
            return int(end.code or FINE)
        return _run(options)
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        _PROGRAM,
        description="Look into, check, convert and tidy checkpoints of PyTorch jobs.",
        epilog="Exit status: 0 fine, 1 damage or a difference, 2 unusable, 3 nothing that could be verified.",
    )
    parser.add_argument("--version", action="version", version=VERSION, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        below = commands.add_parser(
            command.name,
            help=command.about,
            description=f"{command.about[0].upper()}{command.about[1:]}.\n\n{command.description}",
            epilog="\n".join(("examples:", *(f"  {line}" for line in command.examples))),
            formatter_class=_Paragraphs,
            allow_abbrev=False,
        )
        below.set_defaults(command=command)
        for name, how in command.all_arguments:
            below.add_argument(*name.split(", "), **how)
    return parser


class _Paragraphs(argparse.HelpFormatter):
    """Keeps paragraphs apart, and examples as they are, to be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.split("\n\n"))


def _run(options: argparse.Namespace) -> int:
    """Runs a command. An expected error becomes one line and an exit status."""
    from ..errors import CheckpointError, CorruptCheckpointError

    # torch says so where it is imported without numpy, which no command needs.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    command: Command = options.command
    module, _, function = command.run.partition(":")
    try:
        with ExitStack() as quiet:
            if getattr(options, "quiet", False):
                quiet.enter_context(redirect_stdout(quiet.enter_context(open(os.devnull, "w"))))
            status: int = getattr(import_module(f".{module}", __package__), function)(options)
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, MemoryError, CheckpointError) as error:
        print(f"{_PROGRAM} {command.name}: {clean(str(error) or type(error).__name__)}", file=sys.stderr)
        return FOUND if isinstance(error, CorruptCheckpointError) else UNUSABLE
