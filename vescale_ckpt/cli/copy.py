"""Runs the command `copy`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from types import SimpleNamespace

from .._convert.copy import copy
from .._observe.texts import size
from . import output
from .output import FINE, clean


def run(options: SimpleNamespace) -> int:
    try:
        with output.progress("copying") as progress:
            report = copy(options.src, options.dst, overwrite=options.overwrite, progress=progress)
    except KeyboardInterrupt:
        print("stopped: the same command goes on with the files that are missing", file=sys.stderr)
        raise
    if options.json:
        output.print_json("copy/1", asdict(report))
        return FINE
    resumed = f", of which {report.resumed_files:,} files were complete before" if report.resumed_files else ""
    print(f"{clean(report.path)}: {report.files:,} files, {size(report.bytes)}{resumed}, {report.seconds:.2f} s")
    if report.unverified_bytes:
        print(f"{size(report.unverified_bytes)} have no checksums: they are as they were read")
    if report.left_out:
        print(f"left out, as no part of the checkpoint: {clean(', '.join(report.left_out))}")
    return FINE
