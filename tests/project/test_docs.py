"""The pages of docs/ name files that exist and messages that there are, their code runs, docs/design.md is short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_PATH = re.compile(r"`((?:csrc|tests|scripts|benchmarks|examples|docs|vescale_ckpt|_[a-z]+|manager)/[\w/.-]*)`")
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def exists(page: Path, path: str) -> bool:
    places = [ROOT / path, ROOT / "vescale_ckpt" / path, page.parent / path]
    return any(
        place.exists() or place.with_suffix(".h").exists() or place.with_suffix(".py").exists() for place in places
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    named = _PATH.findall(text) + _LINK.findall(text)
    assert [path for path in named if not exists(page, path)] == []


def test_the_design_is_told_in_200_lines() -> None:
    assert len((ROOT / "docs" / "design.md").read_text().splitlines()) <= 200


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for path in [*(ROOT / "vescale_ckpt").rglob("*.py"), ROOT / "setup.py"])
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # texts over several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text().replace("\n", " ")
    quoted = [part.strip() for text in re.findall(r'\*\*"(.*?)"', page) for part in re.split(r"…|\bN\b", text)]
    assert len(quoted) > 12
    assert [part for part in quoted if part and part not in code] == []


def test_the_quick_start_runs(tmp_path: Path) -> None:
    """All blocks, one after another, in a process of its own."""
    blocks = re.findall(r"```(python|sh)\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    lines = []
    for language, text in blocks:
        if language == "python":
            lines.append(text)
        else:
            commands = [f"cli.main({shlex.split(line)[1:]!r})" for line in text.strip().splitlines()]
            lines.append(
                "from vescale_ckpt import cli\n" + "\n".join(f"assert {command} in (0, 1)" for command in commands)
            )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "different" in result.stdout and "sound:" in result.stdout
