"""Runs the commands on a manager's directory: `list`, `latest`, `prune` and `repair`."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from .._checkpoint.native.step_order import path_of
from .._observe.amounts import size
from .._storage.open_storage import checkpoint_path, is_folder
from ..manager.retention import Retention
from . import output
from .output import FINE, FOUND, UNUSABLE, clean, figure

if TYPE_CHECKING:
    from ..manager.listing import ListedStep

_OPTIONS = {"newest": "--keep", "period": "--keep-period", "best": "--best", "best_mode": "--best-mode"}
_OPTION = re.compile(r"^\w+|\bbest(?==)")  # the arguments that an error of `Retention` names


def _root(directory: str) -> str:
    """Raises FileNotFoundError if there is no such directory, in an object store, too."""
    root = checkpoint_path(directory)
    if not is_folder(root):
        raise FileNotFoundError(f"{root} is no directory")
    return root


def list_steps(options: Namespace) -> int:
    from ..manager.listing import listed_steps

    roots = [_root(directory) for directory in options.directories]
    found = sorted((one for root in roots for one in listed_steps(root)), key=lambda one: one.step)
    if options.json:
        output.print_json("list/1", {"steps": [*map(asdict, found)]})
    elif not found:
        print(f"{', '.join(roots)}: no checkpoints")
    else:
        _print_steps(found, len(roots) > 1)
    return UNUSABLE if not found else FOUND if any(one.state == "damaged" for one in found) else FINE


def _print_steps(found: list[ListedStep], has_roots: bool) -> None:
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
            print(f"step {one.step}: {clean(one.reason)}")


def latest(options: Namespace) -> int:
    root, retention = _root(options.directory), _retention(options)
    from ..manager.listing import newest_or_best  # it imports torch

    passed_over: dict[int, str] = {}
    found = newest_or_best(root, retention, quick=not options.full, on_damage=passed_over.__setitem__)
    step, path = (None, None) if found is None else found
    if options.json:
        output.print_json("latest/1", {"step": step, "path": path, "passed_over": passed_over})
    elif path is not None:
        print(path)
    else:
        for damaged, reason in passed_over.items():
            print(f"step {damaged} is passed over: {clean(reason)}")
        print(f"{root} holds no checkpoint that is complete and sound")
    return FINE if path is not None else FOUND if passed_over else UNUSABLE


def prune(options: Namespace) -> int:
    """Removes what the rule does not keep. Raises ValueError for a rule that keeps all or contradicts itself."""
    root = _root(options.directory)
    if options.keep is None:
        raise ValueError("expected --keep: how many checkpoints stay")
    retention = _retention(options)
    from ..manager.clean_up import prune as prune_steps  # it imports torch

    found = prune_steps(root, retention, dry_run=options.dry_run)
    if options.json:
        content = {"removed": found.removed, "kept": found.kept, "dry_run": options.dry_run}
        output.print_json("prune/1", content)
        return FINE
    verb = "would remove" if options.dry_run else "removed"
    for step in found.removed:
        print(f"{verb} {path_of(root, step)}")
    for step in found.in_use:
        print(f"kept {path_of(root, step)}: it is in use")
    print(f"{verb} {len(found.removed):,}, {len(found.kept):,} stay")
    return FINE


def _retention(options: Namespace) -> Retention:
    """The rule that the options state, as far as the command has them. Raises ValueError in the options' names."""
    try:
        keep, period = getattr(options, "keep", None), getattr(options, "keep_period", None)
        return Retention(keep, period, options.best, options.best_mode)
    except ValueError as error:
        raise ValueError(_OPTION.sub(lambda match: _OPTIONS[match[0]], str(error))) from None


def repair(options: Namespace) -> int:
    """Removes orphans below a manager's directory, or in a checkpoint's, and of exports, conversions and copies.
    Writes copies of extra files that are missing."""
    from ..manager.repair import repair as repair_directory  # it imports torch

    root, dry_run = _root(options.directory), options.dry_run
    found = repair_directory(root, dry_run=dry_run)
    if options.json:
        output.print_json("repair/1", {**asdict(found), "dry_run": dry_run})
        return FINE
    verb = "would remove" if dry_run else "removed"
    for path in found.removed:
        print(f"{verb} {path}")
    for path in found.written:
        print(f"{'would write' if dry_run else 'wrote'} {path}, an extra file of the checkpoint")
    print(f"{verb} {len(found.removed):,} orphans" if found.removed else "nothing is left over")
    return FINE
