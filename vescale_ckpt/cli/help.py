"""Prints the help of the command line for both front ends, without importing them: it must come at once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap

from .spec import Command, Value

_FLAGS = ("--help", "-h")
_MOST_COLUMNS = 120
_WIDEST_NAME = 28


def wanted(arguments: Sequence[str]) -> bool:
    """Whether help is asked for, or nothing is."""
    before = list(arguments)[: arguments.index("--")] if "--" in arguments else arguments
    return not before or any(flag in before for flag in _FLAGS)


def text(program: str, about: str, commands: Sequence[Command], arguments: Sequence[str], completion: bool) -> str:
    """The help of the command that the arguments name, or of all. `completion`: whether shells can be taught them."""
    command = next((command for command in commands if command.name in arguments[:1]), None)
    columns = min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
    lines = _of_command(program, command) if command else _of_all(program, about, commands, completion)
    return "\n".join(line for part in lines for line in part.lines(columns, _coloured()))


class _Text:
    """A paragraph, or a line that stays one: a heading, or an example to be copied."""

    def __init__(self, content: str, heading: bool = False, example: bool = False) -> None:
        self.content, self.heading, self.example = content, heading, example

    def lines(self, columns: int, coloured: bool) -> list[str]:
        if self.example:
            return [f"  {self.content}"]
        if self.heading:
            return [f"\033[1m{self.content}\033[0m" if coloured else self.content]
        return wrap(self.content, columns, break_long_words=False, break_on_hyphens=False) or [""]


class _Rows:
    """Names, and what they mean beside them."""

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self.rows = list(rows)

    def lines(self, columns: int, coloured: bool) -> list[str]:
        widest = max((len(name) for name, _ in self.rows if len(name) <= _WIDEST_NAME), default=0)
        found = []
        for name, content in self.rows:
            first, *rest = wrap(content, max(26, columns - widest - 4), break_on_hyphens=False) or [""]
            shown = f"\033[36m{name}\033[0m" if coloured else name
            if len(name) > widest:
                found.append(f"  {shown}")
                rest.insert(0, first)
            else:
                found.append(f"  {shown}{' ' * (widest - len(name))}  {first}".rstrip())
            found += [" " * (widest + 4) + line for line in rest]
        return found


_Part = _Text | _Rows


def _of_all(program: str, about: str, commands: Sequence[Command], completion: bool) -> list[_Part]:
    options = [("--version", "print the version"), ("--help", "print this, or behind a command what it takes")]
    if completion:
        options += [("--install-completion", "teach the shell to complete commands and options")]
    return [
        _Text(f"Usage: {program} COMMAND ...", heading=True),
        _Text(""),
        _Text(about),
        _Text(""),
        _Text("Commands", heading=True),
        _Rows((command.name, command.about) for command in commands),
        _Text(""),
        _Text("Options", heading=True),
        _Rows(options),
    ]


def _of_command(program: str, command: Command) -> list[_Part]:
    positional = [value for value in command.values if not value.is_option]
    names = " ".join(value.metavar or value.parameter.upper() for value in positional)
    parts: list[_Part] = [
        _Text(f"Usage: {program} {command.name} [OPTIONS] {names}".rstrip(), heading=True),
        _Text(""),
        _Text(f"{command.about[0].upper()}{command.about[1:]}."),
    ]
    for paragraph in filter(None, command.description.split("\n\n")):
        parts += [_Text(""), _Text(paragraph)]
    if positional:
        rows = [(value.metavar or value.parameter.upper(), value.full_help) for value in positional]
        parts += [_Text(""), _Text("Arguments", heading=True), _Rows(rows)]
    rows = [(_name(value), value.full_help) for value in command.values if value.is_option]
    parts += [_Text(""), _Text("Options", heading=True), _Rows(rows)]
    if command.examples:
        parts += [_Text(""), _Text("Examples", heading=True), *(_Text(line, example=True) for line in command.examples)]
    return parts


def _name(value: Value) -> str:
    if value.kind is bool:
        return value.name
    return f"{value.name} {value.metavar or value.parameter.upper()}{' ...' if value.many else ''}"


def _coloured() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
