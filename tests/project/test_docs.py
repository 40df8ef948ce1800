"""The pages of docs/ name files that exist, and docs/design.md stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_PATH = re.compile(r"`((?:csrc|tests|scripts|benchmarks|examples|docs|vescale_ckpt|_[a-z]+|manager|convert)/[\w/.-]*)`")
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
