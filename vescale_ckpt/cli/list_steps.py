"""Runs the command `list`: the checkpoints of managers' directories, when they were saved, how large, and how good."""

from __future__ import annotations

from argparse import Namespace
from datetime import datetime
from typing import Any

from .._observe.amounts import size
from . import output
from .output import FINE, FOUND, UNUSABLE, figure


def run(options: Namespace) -> int:
    from .._storage.open_storage import checkpoint_path, is_folder

    roots = [checkpoint_path(directory) for directory in options.directories]
    for root in roots:
        if not is_folder(root):
            raise FileNotFoundError(f"{root} is no directory")
    found = sorted((step for root in roots for step in _steps(root)), key=lambda step: step["step"])
    if options.json:
        output.print_json("list/1", {"steps": found})
    elif not found:
        print(f"{', '.join(roots)}: no checkpoints")
    else:
        _print(found, len(roots) > 1)
    return UNUSABLE if not found else FOUND if any(step["state"] == "damaged" for step in found) else FINE


def _steps(root: str) -> list[dict[str, Any]]:
    from .._checkpoint.native.step_order import SavedOrder, path_of
    from .._checkpoint.open_checkpoint import committed_at
    from .._checkpoint.verify import verify
    from ..manager import step_metrics
    from ..manager.clean_up import data_bytes

    order, found = SavedOrder(root), []
    for step in order.branches:
        path = path_of(root, step)
        report, time = verify(path, quick=True), committed_at(path)
        state = "complete" if report.ok else "damaged" if report.damaged else "not all is here"
        found.append(
            {
                "step": step,
                "saved": None
                if time is None
                else datetime.fromtimestamp(time / 1e9).astimezone().isoformat(" ", "seconds"),
                "bytes": data_bytes(path),
                "metrics": step_metrics.read(path),
                "state": state,
                "reason": report.reason,
                "last": step == order.last,
                "directory": root,
            }
        )
    return found


def _print(found: list[dict[str, Any]], has_roots: bool) -> None:
    metrics = list(dict.fromkeys(name for step in found for name in step["metrics"]))
    rows = [
        [
            str(step["step"]),
            step["saved"] or "",
            size(step["bytes"]),
            *(figure(step["metrics"].get(name)) for name in metrics),
            step["state"] + (", saved last" if step["last"] else ""),
            *([step["directory"]] if has_roots else []),
        ]
        for step in found
    ]
    columns = ["step", "saved", "size", *metrics, "state", *(["in"] if has_roots else [])]
    output.print_table(columns, rows, right=["step", "size", *metrics])
    for step in found:
        if step["reason"]:
            print(f"step {step['step']}: {output.clean(step['reason'])}")
