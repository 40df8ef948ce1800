"""Runs the commands that remove checkpoints and orphans: `prune` and `repair`."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import asdict

from .._checkpoint.native.step_order import path_of
from .._storage.open_storage import checkpoint_path, is_folder
from ..manager.retention import Retention
from . import output
from .output import FINE

_OPTIONS = {"newest": "--keep", "period": "--keep-period", "best": "--best", "best_mode": "--best-mode"}
_OPTION = re.compile(r"^\w+|\bbest(?==)")  # the arguments that an error of `Retention` names


def prune(options: Namespace) -> int:
    """Removes what the rule does not keep. Raises ValueError for a rule that keeps all or contradicts itself."""
    root = checkpoint_path(options.directory)
    if options.keep is None:
        raise ValueError("expected --keep: how many checkpoints stay")
    retention = retention_of(options)
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


def retention_of(options: Namespace) -> Retention:
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

    root = checkpoint_path(options.directory)
    if not is_folder(root):
        raise FileNotFoundError(f"{root} is no directory")
    dry_run = options.dry_run
    found = repair_directory(root, dry_run=dry_run)
    if options.json:
        output.print_json("repair/1", {**asdict(found), "dry_run": dry_run})
        return FINE
    verb = "would remove" if dry_run else "removed"
    for path in found.uploads or ():
        print(f"{'would abort' if dry_run else 'aborted'} the upload of {path}, which did not finish")
    if found.uploads is None:
        print(
            "uploads that did not finish are not looked for: that needs boto3 and an s3:// bucket of the environment's"
        )
    for path in found.removed:
        print(f"{verb} {path}")
    for path in found.written:
        print(f"{'would write' if dry_run else 'wrote'} {path}, an extra file of the checkpoint")
    print(f"{verb} {len(found.removed):,} orphans" if found.removed or found.uploads else "nothing is left over")
    return FINE
