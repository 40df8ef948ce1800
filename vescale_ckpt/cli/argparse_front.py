"""Parses the command line with Python's argparse, where typer is not installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from .spec import Command, Value


def run(
    program: str, about: str, version: str, commands: Sequence[Command], call: Callable[[Command, SimpleNamespace], int]
) -> Callable[[Sequence[str] | None], int]:
    """The function that parses arguments, and calls `call` with a command and its options."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--version", action="version", version=version)
    below = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        examples = "\n".join(f"  {example}" for example in command.examples)
        sub = below.add_parser(
            command.name,
            help=command.about,
            description="\n\n".join(filter(None, (command.about, command.description))),
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for value in command.values:
            _add(sub, value)
    by_name = {command.name: command for command in commands}

    def parse(arguments: Sequence[str] | None) -> int:
        try:
            options = parser.parse_args(arguments)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        return call(by_name[options.command], SimpleNamespace(**vars(options)))

    return parse


def _add(parser: argparse.ArgumentParser, value: Value) -> None:
    more: dict[str, Any] = {"help": value.full_help.replace("%", "%%")}
    if value.kind is bool:
        parser.add_argument(value.name, action="store_true", **more)
        return
    more |= {"type": value.kind, "default": value.default, "metavar": value.metavar or None}
    if value.choices:
        more["choices"] = value.choices
        more["metavar"] = value.metavar or value.parameter.upper()
    if value.many:
        more["action"] = "append"
    parser.add_argument(value.name, **more)
