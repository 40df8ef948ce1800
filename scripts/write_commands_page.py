"""Writes docs/commands.md from the commands of `vescale-ckpt`, or with --check fails if the page is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "commands.md"
sys.path.insert(0, str(ROOT))

from vescale_ckpt.cli.commands import COMMANDS  # noqa: E402

HEAD = """# Commands

<!-- Written by scripts/write_commands_page.py from vescale_ckpt/cli/commands.py. -->

`vescale-ckpt` (or `python -m vescale_ckpt`) inspects, verifies, compares, converts, copies and cleans up checkpoints.
It is part of the [installation](install.md), and needs no GPU and no ranks.

Exit status: **0** success; **1** damage, or a difference; **2** wrong usage, or nothing that can be read; **3** nothing
that can be verified, or values that were not compared. Every command accepts `--json` and then prints one document. Its
field `schema` names the command and a version, as in `"vescale_ckpt/inspect/1"`. The other fields are listed below. NaN
and infinite numbers are strings. A later version may add fields; if the meaning of a field changes, the number rises.

No command runs code of a checkpoint. Names from a checkpoint are printed with control characters escaped.
"""


def page() -> str:
    parts = [HEAD]
    for command in COMMANDS:
        lines = [f"## {command.name}", "", f"{command.about[0].upper()}{command.about[1:]}.", ""]
        if command.description:
            lines += [command.description, ""]
        lines += ["```sh", *command.examples, "```", ""]
        lines += ["| | |", "|---|---|"]
        for name, how in command.all_arguments:
            name = f"{name} {how.get('metavar', '')}".rstrip() if name.startswith("-") else how["metavar"]
            text = how["help"].replace("|", "\\|").replace("*", "\\*")
            lines.append(f"| `{name}` | {text} |")
        lines += ["", f"JSON: {command.json}.", ""]
        parts.append("\n".join(lines))
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is out of date: run {Path(__file__).name}")
    PAGE.write_text(page())
