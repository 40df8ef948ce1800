"""Writes the last section of docs/guarantees.md, or with --check fails if it is out of date or a promise has no test.

Each promise has a comment at its place: <!-- promise: TEXT: tests/x/test_y.py::test_z, tests/cpp/y_test.cpp::A.B -->
or <!-- promise: TEXT: none -->. The last column of the table of faults names tests of tests/manager/.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
BEGIN, END = "<!-- Written by scripts/write_promises_table.py. -->\n", "<!-- End of what is written. -->\n"

_PROMISE = r"<!-- promise: (?P<text>.*?): (?P<tests>none|tests/[^>]*?) -->"
_HEADING_OR_PROMISE = re.compile(r"^##? (?P<heading>.*)$|" + _PROMISE, re.MULTILINE)
_ROW_OF_FAULT = re.compile(r"^\|.*\| (`test_\w+`(?:, `test_\w+`)*) \|$", re.MULTILINE)
_CPP_TEST = re.compile(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", re.MULTILINE)


@functools.cache
def tests_in(file: Path) -> frozenset[str]:
    if file.suffix == ".cpp":
        return frozenset(map(".".join, _CPP_TEST.findall(file.read_text() if file.exists() else "")))
    body = ast.parse(file.read_text() if file.exists() else "").body
    body += [member for node in body if isinstance(node, ast.ClassDef) for member in node.body]
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def table(promises: list[re.Match[str]]) -> Iterator[str]:
    heading, shown = "", ""
    for found in promises:
        heading = found["heading"] or heading
        if found["text"] and heading != shown:
            yield f"\n**{heading}**\n\n| promise | tests |\n|---|---|\n"
            shown = heading
        if found["text"]:
            tests = [f"`{test.removeprefix('tests/')}`" for test in found["tests"].split(", ")]
            yield f"| {found['text']} | {', '.join(tests)} |\n"


def main(arguments: list[str]) -> str | None:
    page = PAGE.read_text()
    own, rest = page.split(BEGIN)
    promises = [*_HEADING_OR_PROMISE.finditer(own)]
    named = [found["tests"].split(", ") for found in promises if found["tests"]]
    faults = [re.findall(r"test_\w+", row) for row in _ROW_OF_FAULT.findall(own)]
    of_faults = {name for path in (ROOT / "tests" / "manager").glob("test_*.py") for name in tests_in(path)}
    places = [test.split("::") for tests in named for test in tests if test != "none"]
    missing = ["::".join((file, *name)) for file, *name in places if not {*name} <= tests_in(ROOT / file)]
    missing += [name for row in faults for name in row if name not in of_faults]
    malformed, without = own.count("<!-- promise") - len(named), named.count(["none"])
    print(f"{len(named)} promises and {len(faults)} rows of faults, of which {without} have no test")
    if missing or malformed:
        return f"{malformed} comments are malformed, and there are no such tests: {', '.join(missing)}"
    written = own + BEGIN + "".join(table(promises)) + "\n" + END + rest.partition(END)[2]
    if arguments != ["--check"]:
        PAGE.write_text(written)
    elif without or page != written:
        return f"{without} promises have no test" if without else f"{PAGE} is out of date: run {Path(__file__).name}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
