#!/usr/bin/env python3
"""Checks the modules of the package: no circle of imports between files, no two files of one name, and DCP's planners
and storage only where DCP calls.

Imports within functions and under TYPE_CHECKING count, too: what they name is known to the file all the same.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "vescale_ckpt"

#: What of `torch.distributed.checkpoint` only its callers' side may import, and where that is.
OF_DCP = {"planner", "planner_helpers", "default_planner", "storage", "filesystem"}
AT_THE_DOOR = [
    "_dcp/*",
    "integrations/dcp.py",
    "_state/chunks.py",  # what tensors say of themselves
    "_engine/torch_private.py",
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            yield from names & modules.keys() or {base} & modules.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules.keys()


def knows_dcp(path: Path) -> bool:
    """Whether a file imports DCP's planners or storage, and is not where DCP calls."""
    names = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for name in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    }
    known = names & {f"torch.distributed.checkpoint.{name}" for name in OF_DCP}
    return bool(known) and not any(path.relative_to(ROOT / PACKAGE).match(door) for door in AT_THE_DOOR)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The sets of files that reach each other by imports (Tarjan's strongly connected components)."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_files: list[str] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        open_files.append(name)
        for other in sorted(imports[name]):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in open_files:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            at = open_files.index(name)
            if len(open_files) - at > 1:
                found.append(open_files[at:])
            del open_files[at:]

    for name in imports:
        if name not in order:
            visit(name)
    return found


def main() -> int:
    modules = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    imports = {name: {other for other in imported(path, modules) if other != name} for name, path in modules.items()}
    wrong = [f"these files import each other: {', '.join(sorted(circle))}" for circle in circles(imports)]
    wrong += [
        f"{path}: only {', '.join(AT_THE_DOOR)} import DCP's planners" for path in filter(knows_dcp, modules.values())
    ]
    names: dict[str, Path] = {}
    for path in modules.values():
        if path.name != "__init__.py" and (other := names.setdefault(path.name.lstrip("_"), path)) != path:
            wrong.append(f"{path}: {other} has the same name")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
