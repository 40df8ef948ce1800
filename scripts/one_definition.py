#!/usr/bin/env python3
"""Finds two definitions of one C++ name: one_definition.py [FOLDER], csrc unless told.

A type that two files define differently in one namespace links without a word, and then either file may get the
other's destructor. Two checks find that in three seconds, where a link of all objects with -flto -Wodr takes two
minutes: the compiler reads all headers as one file, and a source may define types only in an unnamed namespace, or
those of a class.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

TYPE = re.compile(r"^(?:template <.*> )?(?:struct|class|union|enum(?: class)?) (\w+)(?: final)?(?: :[^:].*)? \{")


def compile_headers(folder: Path) -> bool:
    import pybind11

    includes = "".join(f'#include "{path.relative_to(folder)}"\n' for path in sorted(folder.rglob("*.h")))
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-D_GNU_SOURCE"]
    command += ["-fvisibility=hidden", "-fsyntax-only", "-I", str(folder)]
    for system in (pybind11.get_include(), sysconfig.get_paths()["include"]):
        command += ["-isystem", system]
    return subprocess.run([*command, "-x", "c++", "-"], input=includes, text=True).returncode == 0


def types_of_sources(folder: Path) -> list[str]:
    """The types that a source defines for all others to see, as "file:line: ..."."""
    found = []
    for path in sorted(folder.rglob("*.cpp")):
        namespaces: list[str | None] = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if opens := re.match(r"^namespace(?: (\S+))? \{", line):
                namespaces.append(opens[1])
            elif line.startswith("}  // namespace"):
                namespaces.pop()
            elif (defines := TYPE.match(line)) and None not in namespaces:
                found.append(f"{path}:{number}: {defines[1]} belongs into an unnamed namespace, or into a header")
    return found


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "csrc")
    named = types_of_sources(folder)
    for line in named:
        print(line, file=sys.stderr)
    return 0 if compile_headers(folder) and not named else 1


if __name__ == "__main__":
    sys.exit(main())
