#!/usr/bin/env python3
"""Checks that folders of csrc include headers of lower floors and their own only, and that each header has its name.

Streams of the standard library are refused, too: they need its locales, which crash where the compiler links that
library into the engine and torch has loaded another one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# From the top. Folders of one floor do not know each other.
FLOORS = (
    {"bindings"},
    {"hf", "plan", "share", "stage", "fingerprint"},
    {"read", "write", "metadata", "device"},
    {"io", "state"},
    {"format"},
    {"base"},
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}


def main() -> int:
    csrc = Path(__file__).parent.parent / "csrc"
    wrong = []
    headers: dict[str, Path] = {}
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu"):
            continue
        if path.suffix == ".h" and (other := headers.setdefault(path.name, path)) != path:
            wrong.append(f"{path}: {other} has the same name")
        folder = path.relative_to(csrc).parts[0]
        if folder not in FLOOR:
            wrong.append(f"{path}: no floor has the folder {folder}")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if streams := re.match(r"#include <(\w*stream|iomanip|locale|regex|filesystem)>", line):
                wrong.append(f"{path}:{number}: <{streams[1]}> is not for the engine")
            included = re.match(r'#include "(\w+)/', line)
            if included and included[1] != folder and FLOOR.get(included[1], -1) <= FLOOR[folder]:
                wrong.append(f"{path}:{number}: {folder} includes {included[1]}, which is on no lower floor")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
