"""Prints what commands found: tables, progress and JSON; reads options that are pairs."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._observe.amounts import Bar

#: Exit statuses: all well; damage or a difference; usage, or nothing that can be read; nothing that can be verified.
FINE, FOUND, UNUSABLE, UNVERIFIED = 0, 1, 2, 3

_MOST_LINES = 40  #: of one list


def figure(value: float | None) -> str:
    """A number with four digits; empty for None."""
    return "" if value is None else f"{value:.4g}"


def clean(text: str) -> str:
    """Escapes control characters in text of a checkpoint, which could drive the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_json(schema: str, content: dict[str, Any]) -> None:
    """One JSON document. `schema`: its name and version, stated in docs/commands.md. NaN and infinity become texts."""
    print(json.dumps({"schema": f"vescale_ckpt/{schema}", **_plain(content)}, indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    """A table. `right`: the columns that are aligned to the right."""
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, (column, *(row[at] for row in cells)))) for at, column in enumerate(columns)]
    for row in (list(columns), *cells):
        aligned = zip(row, widths, columns, strict=True)
        line = (cell.rjust(width) if name in right else cell.ljust(width) for cell, width, name in aligned)
        print("  ".join(line).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    width = max((len(name) for name, _ in facts), default=0) + 2
    for name, value in facts:
        print(f"{name:<{width}}{clean(value)}")


def print_lines(lines: Sequence[str], options: Namespace) -> None:
    """Lines of a list that may be long; all of them with --all."""
    shown = len(lines) if options.all else _MOST_LINES
    for line in lines[:shown]:
        print(line)
    if len(lines) > shown:
        print(f"… and {len(lines) - shown:,} more (--all)")


@contextmanager
def progress(label: str, quiet: bool = False) -> Iterator[Any]:
    """A context with a function that takes the bytes done and in total, and shows them on a terminal after a second,
    unless `quiet`."""
    bar = Bar(label)
    try:
        yield (lambda done, total: None) if quiet else bar.show
    finally:
        bar.end()


def pairs(option: str, texts: list[str] | None) -> list[tuple[str, str]]:
    """The pairs of an option that is given as OLD=NEW. Raises ValueError for one without `=`."""
    found = []
    for text in texts or ():
        old, sign, new = text.partition("=")
        if not sign:
            raise ValueError(f"{option}: {text!r} has no =")
        found.append((old, new))
    return found
