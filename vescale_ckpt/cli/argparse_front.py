"""Parses the command line with Python's argparse, where typer is not installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from .spec import Command, Value


def run(
    program: str, commands: Sequence[Command], call: Callable[[Command, SimpleNamespace], int]
) -> Callable[[Sequence[str]], int]:
    """The function that parses arguments, and calls `call` with a command and its options."""
    parser = argparse.ArgumentParser(prog=program, add_help=False)
    below = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        sub = below.add_parser(command.name, add_help=False)
        for value in command.values:
            _add(sub, value)
    by_name = {command.name: command for command in commands}

    def parse(arguments: Sequence[str]) -> int:
        try:
            options = parser.parse_args(arguments)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        return call(by_name[options.command], SimpleNamespace(**vars(options)))

    return parse


def _add(parser: argparse.ArgumentParser, value: Value) -> None:
    if value.kind is bool:
        parser.add_argument(value.name, action="store_true")
        return
    more: dict[str, Any] = {"type": value.kind, "default": value.default, "metavar": value.metavar or None}
    if value.choices:
        more["choices"] = value.choices
        more["metavar"] = value.metavar or value.parameter.upper()
    if value.many:
        more["action"] = "append"
    parser.add_argument(value.name, **more)
