"""Describes commands and their arguments for both front ends of the command line, typer's and argparse's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Value:
    """An argument, which must be given (a name without dashes), or an option of a command."""

    name: str  #: "path" or "--max-shard-size"
    help: str
    kind: type = str  #: str, int or float; bool for a flag
    default: Any = None
    metavar: str = ""
    many: bool = False  #: an option that may be given several times: its value is a list or None
    choices: tuple[str, ...] = ()

    @property
    def is_option(self) -> bool:
        return self.name.startswith("--")

    @property
    def parameter(self) -> str:
        """The attribute of the options that a command gets."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def full_help(self) -> str:
        """The help with the choices and the default."""
        text = self.help
        if self.choices:
            text += f" ({', '.join(self.choices)})"
        if self.default not in (None, False, ""):
            text += f" [default: {self.default}]"
        return text


@dataclass(frozen=True)
class Command:
    """A command. Its code is imported when it runs: `--help` must not wait for torch."""

    name: str
    about: str  #: one line
    run: str  #: "module:function" below `vescale_ckpt.cli`; the function takes the options and returns the exit status
    values: tuple[Value, ...]
    description: str = ""  #: paragraphs for the command's own help
    examples: tuple[str, ...] = ()  #: command lines
    json: str = ""  #: the fields of the document that --json prints, for docs/commands.md

    def function(self) -> Callable[[SimpleNamespace], int]:
        module, _, name = self.run.partition(":")
        function: Callable[[SimpleNamespace], int] = getattr(import_module(f".{module}", __package__), name)
        return function
