"""Runs the command `list`: the checkpoints of managers' directories, when they were saved, how large, and how good."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from .._observe.amounts import size
from . import output
from .output import FINE, FOUND, UNUSABLE, figure

if TYPE_CHECKING:
    from ..manager.listing import ListedStep


def run(options: Namespace) -> int:
    from .._storage.open_storage import checkpoint_path, is_folder
    from ..manager.listing import listed_steps

    roots = [checkpoint_path(directory) for directory in options.directories]
    for root in roots:
        if not is_folder(root):  # of an object store
            raise FileNotFoundError(f"{root} is no directory")
    found = sorted((one for root in roots for one in listed_steps(root)), key=lambda one: one.step)
    if options.json:
        output.print_json("list/1", {"steps": [*map(asdict, found)]})
    elif not found:
        print(f"{', '.join(roots)}: no checkpoints")
    else:
        _print(found, len(roots) > 1)
    return UNUSABLE if not found else FOUND if any(one.state == "damaged" for one in found) else FINE


def _print(found: list[ListedStep], has_roots: bool) -> None:
    metrics = list(dict.fromkeys(name for one in found for name in one.metrics))
    rows = [
        [
            str(one.step),
            one.saved or "",
            "" if one.saved_by is None else f"{one.saved_by.ranks:,}",
            size(one.bytes),
            *(figure(one.metrics.get(name)) for name in metrics),
            one.state + (", saved last" if one.last else ""),
            *([one.directory] if has_roots else []),
        ]
        for one in found
    ]
    columns = ["step", "saved", "ranks", "size", *metrics, "state", *(["in"] if has_roots else [])]
    output.print_table(columns, rows, right=["step", "ranks", "size", *metrics])
    for one in found:
        if one.reason:
            print(f"step {one.step}: {output.clean(one.reason)}")
