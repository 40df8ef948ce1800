"""Runs Python programs in forks of one process that has imported torch: their start costs milliseconds, not seconds.

For tests of what a program does, not of how an interpreter starts. A fork ends as a process of multiprocessing does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from harness.ranks import forks

BOUND = 300.0  # seconds


def run_python(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = BOUND,
    **_: Any,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` for a command that starts with `sys.executable`; its output is captured, as text."""
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder, "out"), Path(folder, "error")
        with (
            out.open("w") as stdout,
            error.open("w") as stderr,
            PythonProcess(command, stdout=stdout, stderr=stderr, env=env, cwd=cwd) as process,
        ):
            status = process.wait(timeout)
        return subprocess.CompletedProcess(list(command), status, out.read_text(), error.read_text())


class PythonProcess:
    """Does what the `subprocess.Popen` of such a command does, as far as callers here use it."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        stdin: int | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **_: Any,
    ) -> None:
        interpreter, *arguments = map(str, command)
        assert interpreter == sys.executable
        context = forks()
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        ends: dict[int, Connection | str] = {}
        for number, wanted in ((0, stdin), (1, stdout), (2, stderr)):
            if wanted == subprocess.PIPE:
                reader, writer = context.Pipe(duplex=False)
                ours, ends[number] = (writer, reader) if number == 0 else (reader, writer)
                file = os.fdopen(os.dup(ours.fileno()), "w" if number == 0 else "r")
                ours.close()
                self.stdin, self.stdout = (file, self.stdout) if number == 0 else (self.stdin, file)
            elif wanted == subprocess.STDOUT:
                ends[number] = ends[1]
            elif wanted is not None:
                assert not isinstance(wanted, int)
                ends[number] = wanted.name
        environment = dict(os.environ if env is None else env)
        self.process = context.Process(target=_run, args=(arguments, environment, str(cwd or os.getcwd()), ends))
        self.process.start()
        for end in ends.values():
            if isinstance(end, Connection):
                end.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = BOUND) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.process.exitcode

    def communicate(self, timeout: float = BOUND) -> None:
        """Only ends it: nothing is sent, and what is left of its output is not kept."""
        for file in (self.stdin, self.stdout):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
        self.wait(timeout)

    def kill(self) -> None:
        self.process.kill()

    def __enter__(self) -> PythonProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.kill()
            self.process.join(BOUND)


def _run(arguments: list[str], environment: dict[str, str], directory: str, ends: dict[int, Connection | str]) -> None:
    """In the fork: what an interpreter does with its arguments."""
    gc.freeze()
    for number, end in ends.items():
        if isinstance(end, str):
            file = os.open(end, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
        else:
            os.dup2(end.fileno(), number)
    for end in ends.values():
        if isinstance(end, Connection) and not end.closed:
            end.close()
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if number in ends:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if threads := environment.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    kind, *rest = arguments
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.path.insert(0, directory)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(kind))
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
