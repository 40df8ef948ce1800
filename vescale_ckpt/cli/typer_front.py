"""Parses the command line with typer, where it is installed: completion for shells."""

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from .spec import Command, Value


def run(
    program: str, commands: Sequence[Command], call: Callable[[Command, SimpleNamespace], int]
) -> Callable[[Sequence[str]], int]:
    """The function that parses arguments, and calls `call` with a command and its options."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=True)
    app.callback()(_nothing)
    for command in commands:
        app.command(command.name, help=command.about)(_function(command, call))

    def parse(arguments: Sequence[str]) -> int:
        try:
            app(args=arguments, prog_name=program)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        return 0

    return parse


def _nothing() -> None: ...


def _function(command: Command, call: Callable[[Command, SimpleNamespace], int]) -> Callable[..., None]:
    """A function with the signature that typer reads the command's arguments from."""

    def function(**options: Any) -> None:
        raise typer.Exit(call(command, SimpleNamespace(**options)))

    parameters = [
        inspect.Parameter(
            value.parameter, inspect.Parameter.KEYWORD_ONLY, default=_default(value), annotation=_annotation(value)
        )
        for value in command.values
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _default(value: Value) -> Any:
    if value.kind is bool:
        return False
    return value.default if value.is_option else inspect.Parameter.empty


def _annotation(value: Value) -> Any:
    more: dict[str, Any] = {"help": value.help}
    if value.metavar:
        more["metavar"] = value.metavar
    kind: Any = Literal[value.choices] if value.choices else value.kind
    if value.many:
        kind = list[kind]
    if value.is_option and value.kind is not bool and value.default is None:
        kind = kind | None
    if not value.is_option:
        return Annotated[kind, typer.Argument(**more)]
    return Annotated[kind, typer.Option(value.name, **more)]
