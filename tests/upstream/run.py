"""Runs PyTorch's own tests of `torch.distributed.checkpoint`, with stock DCP and with this package in its place.

Usage: python tests/upstream/run.py FOLDER [FILE ...] [--work DIR] [--page PAGE] [--seconds N]

FOLDER is `test/distributed/checkpoint` of PyTorch's source, of a version near the installed torch. No file of it is
part of this repository. The tests import `expecttest`, and some of them `fsspec` and `safetensors`.

Each file runs twice, each time in a process of its own. Outcomes that differ and are not listed in `expected.toml` make
the exit status 1, as do outcomes that are listed and do not differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import tomllib
import torch

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

# What the two outcomes of a test mean, in the order of the table's columns.
BOTH_PASS = "pass in both"
BY_DESIGN = "differs by design"
WRONG = "wrong"
ONLY_OURS = "pass with ours only"
BOTH_FAIL = "fail in both"
SKIPPED = "skipped"
MEANINGS = (BOTH_PASS, BY_DESIGN, WRONG, ONLY_OURS, BOTH_FAIL, SKIPPED)


@dataclass(frozen=True)
class Outcome:
    word: str  # passed, failed, skipped, did not end
    text: str  # pytest's of a failure


#: Tests without a need for GPUs name them all the same. On a machine without any, a copy of them says CPU.
_ON_THE_CPU = {
    r"cpu:gloo,cuda:nccl": "gloo",
    r"/cuda:(\{[^}]*\}|\d)": "/cpu",
    r"""f?(["'])cuda(:\d|:\{[^}"']*\})?\1""": '"cpu"',
    r"torch\.cuda\.device_count\(\)": "4",
    r"torch\.cuda\.current_device\(\)": '"cpu"',
}


def copy_for_the_cpu(folder: Path, to: Path) -> Path:
    """The tests of a folder, copied for a machine without GPUs."""
    for file in folder.rglob("*.py"):
        text = file.read_text()
        for pattern, instead in _ON_THE_CPU.items():
            text = re.sub(pattern, instead, text)
        copy = to / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    return to


def run_file(
    file: Path, folder: Path, work: Path, seconds: float, *, ours: bool
) -> tuple[dict[str, Outcome], set[str]]:
    """The outcomes of a file's tests by their names, and the names of those that came to this package's classes."""
    work = work / ("ours" if ours else "stock") / file.relative_to(folder).with_suffix("")
    if not ours and (work / "ended").exists():  # of a run before, with the same --work
        return outcomes_in(work / "record.jsonl"), set()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    record, reached = work / "record.jsonl", work / "reached.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "inside"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "VESCALE_CKPT_UPSTREAM_RECORD": str(record),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(work),
    }
    environment.pop("VESCALE_CKPT_UPSTREAM_REACHED", None)
    if ours:
        environment["VESCALE_CKPT_UPSTREAM_REACHED"] = str(reached)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_record", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder), str(file)]
    with open(work / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    (work / "ended").touch()
    outcomes = outcomes_in(record)
    if not outcomes:
        outcomes[file.relative_to(folder).as_posix()] = Outcome("failed", (work / "log").read_text())
    return outcomes, set(reached.read_text().splitlines()) if reached.exists() else set()


def outcomes_in(record: Path) -> dict[str, Outcome]:
    lines = record.read_text().splitlines() if record.exists() else []
    return {said["test"]: Outcome(said["outcome"], said["text"]) for said in map(json.loads, lines)}


def reason_of(test: str, expected: list[dict[str, object]]) -> str | None:
    for entry in expected:
        if any(fnmatchcase(test, pattern) for pattern in entry["tests"]):  # type: ignore[attr-defined]
            return str(entry["reason"])
    return None


def meaning(stock: str, ours: str, is_expected: bool) -> str:
    if stock == ours:
        return {"passed": BOTH_PASS, "skipped": SKIPPED}.get(stock, BOTH_FAIL)
    if ours == "passed":
        return ONLY_OURS
    if stock == "passed":
        return BY_DESIGN if is_expected else WRONG
    return BOTH_FAIL


def table(counts: dict[str, Counter[str]]) -> Iterator[str]:
    yield "| file | " + " | ".join(MEANINGS) + " | reach ours |"
    yield "|---|" + "---:|" * (len(MEANINGS) + 1)
    total: Counter[str] = Counter()
    for file, of_file in counts.items():
        total += of_file
        yield f"| {file} | " + " | ".join(str(of_file[name] or "") for name in (*MEANINGS, "reach ours")) + " |"
    yield "| **all** | " + " | ".join(f"**{total[name]}**" for name in (*MEANINGS, "reach ours")) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="of the folder; all of them if none is named")
    parser.add_argument(
        "--work", type=Path, help="a folder for logs, which stays; what stock did there before counts again"
    )
    parser.add_argument("--page", type=Path, help="the table and the differences go into this file")
    parser.add_argument("--seconds", type=float, default=900.0, help="most time of a file")
    arguments = parser.parse_args()
    expected = tomllib.loads((HERE / "expected.toml").read_text())["differs"]
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        folder = arguments.folder.resolve()
        if not torch.cuda.is_available():
            folder = copy_for_the_cpu(folder, work.resolve() / "tests")
        files = [folder / name for name in arguments.files] or sorted(folder.rglob("test_*.py"))
        return compare(folder, files, expected, work, arguments.page, arguments.seconds)


def compare(
    folder: Path, files: list[Path], expected: list[dict[str, object]], work: Path, page: Path | None, seconds: float
) -> int:
    counts: dict[str, Counter[str]] = {}
    differences: list[str] = []
    new = 0
    for file in files:
        name = file.relative_to(folder).as_posix()
        stock, _ = run_file(file, folder, work, seconds, ours=False)
        ours, reached = run_file(file, folder, work, seconds, ours=True)
        counts[name] = Counter()
        missing = Outcome("not run", "")
        for test in sorted({*stock, *ours}):
            before, after = stock.get(test, missing), ours.get(test, missing)
            reason = reason_of(test, expected)
            means = meaning(before.word, after.word, reason is not None)
            counts[name][means] += 1
            counts[name]["reach ours"] += test in reached
            if means == BY_DESIGN:
                differences.append(f"- `{test}`: {reason}")
            elif means == WRONG:
                new += 1
                print(f"WRONG {test}: {before.word}, with ours {after.word}\n{after.text[-3000:]}", flush=True)
            elif reason is not None and means in (BOTH_PASS, ONLY_OURS):
                new += 1
                print(f"LISTED {test}: does not differ ({means})", flush=True)
        print(f"{name}: " + ", ".join(f"{number} {words}" for words, number in counts[name].items()), flush=True)
    lines = [*table(counts), "", *differences]
    print("\n".join(lines))
    if page is not None:
        page.write_text("\n".join(lines) + "\n")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
