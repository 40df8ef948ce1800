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

Settings are environment variables that are read when a save or load begins. Arguments of the call take precedence. No
setting is needed to start: see the [quick start](quickstart.md). All variables are checked at that time, on all ranks:
if one is invalid on any rank, even if it is not used, every rank raises. For a variable with this prefix that is not a
setting, a warning names the most similar setting.

"""

TAIL = """## On one machine

`VESCALE_CKPT_NODE`, a whole number, identifies the machine of a process. By default, processes with the same kernel
boot ID count as one machine.

## At build time

`CXX` selects the compiler, `VESCALE_CKPT_NO_NVCC=1` omits the CUDA kernels, `VESCALE_CKPT_WERROR=1` turns warnings into
errors.
"""

MOST_BYTES = 1 << 40  # larger limits count as unlimited

#: Text of the page in addition to `Setting.help`.
MORE = {
    "threads": "Argument: `thread_count=`.",
    "memory_bytes": "In each process, the slots (transfer buffers of 8 MiB) may take this much, and keep it between "
    "saves; tensors in transit in a conversion may take as much in addition; reading for other ranks "
    "(`broadcast_checkpoint=`) may take half of it, and releases it after the load. Snapshots have their own limit.",
    "direct_io": "`on`: raise if files cannot bypass it; `off`: never try. Argument: `direct_io=`.",
    "snapshot_bytes": "A snapshot is the copy in host memory that an asynchronous save writes from. The free memory is "
    "determined at the first snapshot, within the limits of the control group, and divided by `LOCAL_WORLD_SIZE`. "
    "Tensors that exceed the limit are written before the save returns.",
    "copy_batches": "1: up to 512 copies per call of `cudaMemcpyBatchAsync`, if the driver supports CUDA 12.8 or later "
    "and all host memory could be page-locked. Set it to 0 if saves or loads hang or crash in that call.",
    "alone": "By default, that is an error if `WORLD_SIZE` is above 1. Each process then needs its own directory.",
    "log": "Each line names the rank. At `info`, each save and load prints a line when it begins and when it ends.",
    "progress": "On a terminal, a line that is updated; otherwise a line every 10 seconds.",
    "trace": "[How to use it](howto/slow-save.md).",
    "report_seconds": "The line names the rank's step; if ranks wait for others, the lowest waiting rank names these.",
    "timeout": "After that, all ranks raise `CheckpointTimeoutError`. Argument: `timeout=`.",
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
