"""Writes docs/settings.md from vescale_ckpt/settings.py, or with --check fails if the page is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "settings.md"
sys.path.insert(0, str(ROOT))

from vescale_ckpt.settings import SETTINGS, MiB, Setting  # noqa: E402

HEAD = """# Settings

<!-- Written by scripts/write_settings_page.py from vescale_ckpt/settings.py. -->

Settings are environment variables. They are read when a save or load begins. An argument of the call takes precedence.
All variables are checked then, on all ranks: if one is wrong on any rank, needed or not, every rank raises. For a
variable with this prefix that is no setting, a warning names the most similar setting.

"""

TAIL = """## On one machine

`VESCALE_CKPT_NODE`, a whole number, says which machine a process is on. Without it, processes under the same boot of a
kernel count as one machine.

## At build time

`CXX` chooses the compiler, `VESCALE_CKPT_NO_NVCC=1` leaves out the CUDA kernels, `VESCALE_CKPT_WERROR=1`
turns warnings into errors.
"""

MOST_BYTES = 1 << 40  # larger limits are none

#: What the page says of a setting beyond its line in the table of the code.
MORE = {
    "threads": "Argument: `thread_count=`.",
    "memory_bytes": "In each process: slots of 8 MiB may take as much, and keep it between saves; tensors under way in "
    "a conversion may take as much beside them; reading for other ranks (`broadcast_checkpoint=`) may take half of it, "
    "and gives it back after the load. Snapshots have a limit of their own.",
    "direct_io": "`on`: fail where files cannot bypass it; `off`: never try. Argument: `direct_io=`.",
    "snapshot_bytes": "Free is what is free at the first one (the control group's limit counts), divided by "
    "`LOCAL_WORLD_SIZE`. Tensors that exceed it are written before the save returns.",
    "copy_batches": "Otherwise up to 512 travel in one call of `cudaMemcpyBatchAsync`, where the driver is that of "
    "CUDA 12.8 or later and all host memory could be page-locked. Set it to 0 if saves or loads hang or crash in it.",
    "exit_timeout": "These are asynchronous saves.",
    "alone": "Without it that is an error where `WORLD_SIZE` is above 1. Each process then needs its own directory.",
    "log": "The lines name the rank. At `info` each save and load prints one line at its beginning and one at its end.",
    "progress": "A line that is updated on a terminal, else a line every 10 seconds.",
    "trace": "[How to](howto/slow-save.md).",
    "report_seconds": "The line says where the rank is; where ranks wait for others, the lowest that waits names them.",
    "timeout": "In each step of a save or load; then all raise `CheckpointTimeoutError`.",
}


def number(setting: Setting, value: int) -> str:
    if "bytes" in setting.name and value and value % MiB == 0:
        return f"{value} ({value // MiB} MiB)"
    return f"{value:,}"


def section(setting: Setting) -> str:
    default = setting.default
    shown = (f"`{default}`" if default else "empty") if isinstance(default, str) else number(setting, default)
    if setting.choices:
        allowed = f"one of {', '.join(f'`{choice}`' for choice in setting.choices)}"
    elif isinstance(default, str):
        allowed = "any text"
    elif setting.most < MOST_BYTES:
        allowed = f"{number(setting, setting.least)} to {setting.most:,}"
    else:
        allowed = f"at least {number(setting, setting.least)}"
    about = setting.help[0].upper() + setting.help[1:].rstrip(".") + "."
    text = " ".join(part for part in (about, MORE.get(setting.name, "")) if part)
    return f"## {setting.variable}\n\nDefault: {shown}. Allowed: {allowed}.\n\n{text}\n\n"


def page() -> str:
    if unknown := sorted(MORE.keys() - SETTINGS.keys()):
        raise KeyError(f"no settings: {', '.join(unknown)}")
    return HEAD + "".join(map(section, SETTINGS.values())) + TAIL


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is out of date: run {Path(__file__).name}")
    PAGE.write_text(page())
