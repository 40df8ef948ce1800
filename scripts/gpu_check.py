"""What a machine with a GPU is to check, call after call and step after step: see gpu_check.sh.

No step stops the next, but a build that fails. Each has a time limit, a log, and ends as ok, failed or skipped, with
the reason. The report is written again after every step and figure, so that a killed run leaves what it had. Exit
status: 1 if a step failed, 2 for wrong options, 128 + number for a signal, else 0. Only the standard library is used
here: torch is for the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import gpu_plan
from gpu_machine import Machine
from gpu_plan import Call, Step, groups, limit_now, seconds_of
from gpu_report import Report, Result

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu_check"
LEAST = 3.0  # seconds that a step needs to be begun at all
KILL_SECONDS = 5.0
SHOWN = 5000  # characters of the log of a build that failed


class Interrupted(BaseException):
    pass


class Running:
    """A step in a session of its own, so that what it started ends with it."""

    def __init__(self, step: Step, report: Report, limit: float) -> None:
        self._step, self._limit = step, limit
        self._log = report.log(step.name)
        self.result = Result(step.name, step.what, "begun")
        report.add(self.result)
        environment = {**os.environ, **step.environment, **report.environment, "PYTHONFAULTHANDLER": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        environment.pop("OUT", None)  # which has room for few files
        self._began = time.monotonic()
        with open(self._log, "wb") as output:
            self._child = subprocess.Popen(
                [sys.executable, *step.command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether it is over, by itself or by its limit."""
        if self.result.status != "begun":
            return True
        status = self._child.poll()
        seconds = time.monotonic() - self._began
        if status is None and seconds < self._limit:
            return False
        self.end()
        self.result.seconds = round(seconds, 1)
        self.result.status, self.result.why = self._answer(status)
        return True

    def _answer(self, status: int | None) -> tuple[str, str]:
        of_pytest = "pytest" in self._step.command
        if status is None:
            return "failed", f"not done after {self._limit:.0f} s"
        if status == 5 and of_pytest:
            return "failed", "there was no such test"
        if status != 0:
            return "failed", f"status {status}: {_last_line(self._log)}"
        if of_pytest and " passed" not in _last_line(self._log):
            return "skipped", _last_line(self._log)
        return "ok", ""

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)  # what it started may outlive it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(KILL_SECONDS)  # a process may hang in the driver for ever, and the others go on


def run_group(group: Sequence[Step], report: Report, limits: dict[str, float]) -> list[Result]:
    """Runs steps at the same time."""
    running: list[Running] = []
    try:
        for step in group:
            running.append(Running(step, report, limits[step.name]))
        while not all([one.ended() for one in running]):
            report.refresh()
            time.sleep(0.05)
    finally:
        for one in running:
            one.end()
    return [one.result for one in running]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip(" =").replace("|", "/")[:200] if lines else "no output"


def run_steps(steps: Sequence[Step], report: Report, machine: Machine, until: float, done: dict[str, str]) -> None:
    """Runs what can run. `until`: on the monotonic clock; `done`: how steps of this process ended, by name, to which
    these are added."""
    waiting = list(groups(steps))
    while waiting:
        group = waiting.pop(0)
        left = until - time.monotonic()
        able = []
        for step in group:
            failed = [name for name in step.after if done.get(name) == "failed"]
            why = step.missing(machine) or (f"{failed[0]} failed" if failed else "")
            if left < LEAST:
                why = "no time is left in this call"
            if why:
                report.add(Result(step.name, step.what, "skipped", why))
                _tell(report.results[step.name])
            else:
                able.append(step)
        if able:
            later = [step for further in waiting for step in further]
            results = run_group(able, report, limit_now(able, later, left))
            for result in results:
                _tell(result)
        for step in group:
            result = report.results[step.name]
            done[step.name] = result.status
            if step.has_all_time and result.status == "failed":
                print(report.log(step.name).read_text(errors="replace")[-SHOWN:], flush=True)
        report.write()


def _tell(result: Result) -> None:
    print(f"{result.name:24} {result.status:8} {result.seconds:6.1f} s  {result.why}", flush=True)


def chosen(call: str | None, only: str | None) -> list[Call]:
    """The calls that the options ask for, each with those of its steps."""
    calls = [found for found in gpu_plan.CALLS if call in (None, found.name)]
    known = list(dict.fromkeys(step.name for found in calls for step in found.steps))
    if not calls:
        _refuse(f"--call: expected one of {', '.join(found.name for found in gpu_plan.CALLS)}, got {call}")
    if only is None:
        return calls
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        _refuse(f"--only: no step is named {', '.join(unknown) or 'so'}; there are {', '.join(known)}")
    found = {step.name: step for call in reversed(calls) for step in call.steps if step.name in names}
    steps = tuple(sorted(found.values(), key=lambda step: known.index(step.name)))
    return [Call(",".join(names), "steps", steps)]


def _refuse(text: str) -> None:
    print(f"gpu_check: {text}", file=sys.stderr)
    raise SystemExit(2)


def plan_of(calls: Sequence[Call]) -> str:
    """The calls as they are to be typed, with the limits of their steps."""
    lines = []
    python = f"PYTHON={shlex.quote(os.environ['PYTHON'])} " if "PYTHON" in os.environ else ""
    for call in calls:
        lines.append(f"{python}scripts/gpu_check.sh --call {call.name}  # {call.what}")
        for step in (step for group in groups(call.steps) for step in group):
            beside = " (beside the one before)" if step.beside else ""
            lines.append(f"  {step.limit:4.0f} s  {step.name:24} {step.what}{beside}")
        lines.append(f"  {seconds_of(call.steps):4.0f} s  in all, of {gpu_plan.BUDGET:.0f} s")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--call", metavar="NAME", help="this call (default: all, one after the other)")
    parser.add_argument("--only", metavar="STEP,...", help="these steps")
    parser.add_argument(
        "--budget", type=float, default=gpu_plan.BUDGET, help="seconds for a call (default %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="the names of each call's steps")
    parser.add_argument("--plan", action="store_true", help="the calls, with their steps and limits")
    parser.add_argument("--work", type=Path, default=WORK, help="where logs and figures are kept (default %(default)s)")
    options = parser.parse_args()
    calls = chosen(options.call, options.only)
    if options.list:
        print("\n".join(f"{call.name}: {', '.join(step.name for step in call.steps)}" for call in calls))
        return 0
    if options.plan:
        print(plan_of(calls))
        return 0
    # The first call begins a report, which the others go on with.
    first = options.only is None and calls[0].name == gpu_plan.CALLS[0].name
    out = os.environ.get("OUT")
    report = Report(options.work.resolve(), Path(out).resolve() if out else None, anew=first)

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    status, done = 0, dict[str, str]()
    try:
        until = time.monotonic() + options.budget
        machine = Machine.found()
        for call in calls:
            steps = [step for step in call.steps if step.name not in done]
            run_steps(steps, report, machine, until, done)
            until = time.monotonic() + options.budget
    except Interrupted as signal_:
        status = 128 + int(signal_.args[0])
        report.interrupted = f"ended by {signal.Signals(signal_.args[0]).name} before all steps were done"
    report.write()
    print(
        f"\nreport: {report.folder / 'report.md'}\n\n{report.text()}", flush=True
    )  # last: the end of an output is kept
    return status or int("failed" in done.values())


if __name__ == "__main__":
    sys.exit(main())
