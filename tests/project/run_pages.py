"""Runs the code blocks of pages, each page in a directory of its own: `python run_pages.py [--ranks N] PAGE...`.

The ```python blocks of a page run one after another in one namespace. Of ```sh blocks the lines that begin with
`vescale-ckpt` run, in this process. Prints what went wrong, by page and line. Exit status 1 if anything did.

With `--ranks` the pages run on that many ranks, in the working directory. They are forked after the imports, which cost
more than most pages.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

import vescale_ckpt
from vescale_ckpt import cli

vescale_ckpt.save  # noqa: B018  # imports what the pages need

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(page: Path) -> None:
    text = page.read_text()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for match in _BLOCK.finditer(text):
        first = text.count("\n", 0, match.start()) + 1  # lines before the block's first
        if match[1] == "python":
            exec(compile("\n" * first + match[2], page, "exec"), namespace)
        elif match[1] == "sh" and os.environ.get("RANK", "0") == "0":
            for line in match[2].replace("\\\n", " ").splitlines():
                if line.startswith("vescale-ckpt "):
                    status = cli.main(shlex.split(line, comments=True)[1:])
                    if status not in (0, 1):
                        raise RuntimeError(f"{page}: exit status {status}: {line}")


def run_all(pages: list[str], directory: str | None) -> int:
    faulthandler.dump_traceback_later(150)  # before the test ends this process
    failed = False
    for page in pages:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as own:
            os.chdir(directory or own)
            try:
                run(Path(page))
            except BaseException:  # SystemExit, too: a page must not end the others
                failed = True
                print(f"--- {page}", file=sys.stderr)
                traceback.print_exc()
            finally:
                os.chdir("/")
                if dist.is_initialized():
                    dist.destroy_process_group()
        print(f"{page}: {time.perf_counter() - began:.2f} s", flush=True)
    return int(failed)


def main(arguments: list[str]) -> int:
    if arguments[0] != "--ranks":
        return run_all(arguments, None)
    os.environ["WORLD_SIZE"] = arguments[1]
    children = []
    for rank in range(int(arguments[1])):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = run_all(arguments[2:], os.getcwd())
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return int(any([os.waitpid(child, 0)[1] for child in children]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
