"""Runs the commands of `vescale-ckpt` (or `python -m vescale_ckpt`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import CheckpointError
from . import convert, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    parser = argparse.ArgumentParser(prog="vescale-ckpt", description="Checkpoints of PyTorch jobs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "plan",
        help="simulate planning a save",
        description=plan.DESCRIPTION,
        epilog=plan.MODEL_NAMES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_arguments(command)
    command.set_defaults(run=plan.run)
    about = "write a checkpoint in another format"
    command = commands.add_parser("convert", help=about, description=convert.DESCRIPTION)
    convert.add_arguments(command)
    command.set_defaults(run=convert.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError, OSError, CheckpointError) as error:
        print(f"{parser.prog} {options.command}: {error}", file=sys.stderr)
        return 1
