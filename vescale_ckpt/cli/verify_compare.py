"""Runs the commands that read checkpoints whole: `verify` and `diff`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from .._observe.amounts import size
from ..errors import some
from . import output
from .output import FINE, FOUND, UNUSABLE, UNVERIFIED, clean, figure

if TYPE_CHECKING:
    from ..reports import Damage

_MOST_NAMED = 5  # keys that have one damage


def verify(options: Namespace) -> int:
    from .._checkpoint.verify import verify_checkpoint

    with output.progress("verifying", options.quiet) as progress:
        report = verify_checkpoint(options.path, options.quick, progress, must_exist=True)
    status = FINE if report.ok else FOUND if report.damaged else UNUSABLE
    unverified = report.unverified_bytes
    if report.ok and unverified == report.bytes > 0:
        status = UNVERIFIED
    if options.json:
        output.print_json("verify/1", {"ok": report.ok, **asdict(report)})
        return status
    for kind, found in (
        ("damaged", report.damaged),
        ("refused", report.refused),
        ("could not be read", report.unreadable),
        ("harmless", report.harmless),
    ):
        output.print_lines([f"{kind}: {clean(text)}" for text in _by_reason(found)], options)
    for text in report.unchecked:
        print(f"not checked: {clean(text)}")
    checked = f"{'structure' if report.quick else size(report.bytes)} checked"
    problems = len(report.damaged)
    verdict = "refused: loads do not trust it" if report.refused else "not known: something could not be read"
    verdict = f"{problems:,} problem{'s' * (problems != 1)}" if problems else verdict
    if report.ok:
        verdict = "complete, data not checked" if report.quick else "sound"
        if unverified:
            verdict = "readable, not verified" if status == UNVERIFIED else "sound as far as there are checksums"
            checked = f"{size(report.bytes - unverified)} checked, {size(unverified)} read without checksums"
    print(f"{verdict}: {report.keys:,} keys in {report.files:,} file{'s' * (report.files != 1)}, {checked}")
    return status


def _by_reason(found: list[Damage]) -> list[str]:
    """Each reason with its keys, and its file if it does not name that: one missing file damages many keys."""
    keys: dict[tuple[str, str], list[str]] = {}
    for damage in found:
        keys.setdefault((damage.reason, damage.file), []).extend([damage.key] if damage.key is not None else [])
    texts = []
    for (reason, file), names in keys.items():
        text = reason if file in reason else f"{reason} ({file})"
        unsaid = [name for name in names if name not in reason]
        if unsaid:
            more = f" and {len(unsaid) - _MOST_NAMED:,} more" if len(unsaid) > _MOST_NAMED else ""
            text = f"{', '.join(unsaid[:_MOST_NAMED])}{more}: {text}"
        texts.append(text)
    return texts


def diff(options: Namespace) -> int:
    if options.fingerprints:
        return _diff_fingerprints(options)
    from .._inspect.diff import diff

    with output.progress("comparing", options.quiet) as progress:
        found = diff(
            options.a, options.b, with_values=options.values, bits=options.bits, keys=options.keys,
            rename=dict(output.pairs("--rename", options.rename)) or None, progress=progress,
        )  # fmt: skip
    status = FOUND if found.different else UNVERIFIED if found.not_compared else FINE
    if options.json:
        output.print_json("diff/1", asdict(found) | {"equal": found.equal})
        return status
    kinds = [f"differs: {clean(key)}: {ours} in A, {theirs} in B" for key, (ours, theirs) in found.kinds.items()]
    output.print_lines([f"only in A: {clean(key)}" for key in found.only_a], options)
    output.print_lines([f"only in B: {clean(key)}" for key in found.only_b], options)
    output.print_lines(kinds, options)
    output.print_lines([f"another value: {clean(key)}" for key in found.objects], options)
    output.print_lines([f"other bytes, by checksum: {clean(key)}" for key in found.checksums], options)
    output.print_lines([f"values not compared: {clean(key)}" for key in found.not_compared], options)
    if found.values:
        rows = [
            (
                value.key,
                f"{value.different:,}",
                f"{value.elements:,}",
                "" if value.unknown else figure(value.max_abs),
                "" if value.unknown else figure(value.max_rel),
                f"{value.not_finite_a:,}",
                f"{value.not_finite_b:,}",
            )
            for value in found.values
        ]
        columns = ("tensor", "different", "of", "max abs", "max rel", "not finite A", "not finite B")
        output.print_table(columns, rows, right=columns[1:])
    what = "bits" if options.bits else "values" if options.values else "checksums"
    compared = f"; {what} of {found.compared:,} tensors compared, {size(found.compared_bytes)}"
    if found.not_compared:
        compared += f"; {len(found.not_compared):,} values not compared (--values reads them)"
    print(f"{'different' if found.different else 'not known' if found.not_compared else 'equal'}{compared}")
    return status


def _diff_fingerprints(options: Namespace) -> int:
    """Raises ValueError for options that need data."""
    for name in ("values", "bits", "keys", "rename"):
        if getattr(options, name):
            raise ValueError(f"--fingerprints and --{name} exclude each other")
    from .._inspect.diff_runs import diff_runs

    found = diff_runs(options.a, options.b)
    status = FOUND if found.different else FINE if found.equal else UNVERIFIED
    if options.json:
        output.print_json("diff-fingerprints/1", asdict(found) | {"equal": found.equal})
        return status
    named = {"only in A": found.only_a, "only in B": found.only_b, "without a fingerprint": found.steps_without}
    for what, steps in named.items():
        if steps:
            print(f"{what}: steps {some([*map(str, steps)])}")
    output.print_lines([f"differs: {clean(key)}: {clean(how)}" for key, how in found.different.items()], options)
    output.print_lines([f"not compared: {clean(key)}" for key in found.not_compared], options)
    verdict = "different" if found.different else "equal" if found.equal else "not known"
    where = "" if found.step is None else f" from step {found.step} on"
    equal = f"; {len(found.equal_steps):,} steps are equal" if found.equal_steps else ""
    print(f"{verdict}{where}{equal}")
    return status
