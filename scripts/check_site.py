"""Checks the site that mkdocs has built.

All public names have text, no link is broken, nothing is fetched from elsewhere, lines of code fit a screen, and the
search finds what newcomers look for.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
CODE_COLUMNS = 124  # characters of a line of code at 1280 pixels, with docs/style.css (measured in Chromium)
#: what people type into the search, and the page that has all of these words in one section
SEARCHES = {
    "resume on more gpus": "howto/ranks.html",
    "install": "install.html",
    "wandb": "howto/slow-save.html",
    "license": "install.html",
    "max_to_keep": "howto/manager.html",
}


class Page(HTMLParser):
    """The ids, links and fetched addresses of a page, and how long the text is that follows each heading of a name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.text_of: dict[str, int] = {}
        self.longest_line = ""  # of all blocks of code
        self._name = ""
        self._code: str | None = None  # of the open block
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.fetched.append(given["href"])
        if tag == "pre":
            self._code = ""
        if tag in ("h1", "h2", "h3", "h4", "h5"):
            self._name = given.get("id", "")
            self.text_of[self._name] = 0

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre" and self._code is not None:
            self.longest_line = max([self.longest_line, *self._code.splitlines()], key=len)
            self._code = None

    def handle_data(self, data: str) -> None:
        if self._code is not None:
            self._code += data
        if self._name:
            self.text_of[self._name] += len(data.strip())


def public_names() -> set[str]:
    """`vescale_ckpt.__all__`, without importing it: the names in the table of `vescale_ckpt/__init__.py`."""
    for node in ast.parse((ROOT / "vescale_ckpt" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_NAMES":
            return {name for names in ast.literal_eval(node.value).values() for name in names}
    raise SystemExit("vescale_ckpt/__init__.py has no table _NAMES any more")


def hit(query: str, page: str) -> bool:
    """Whether a section of a page has words that begin with each word of the query."""
    index = json.loads((SITE / "search" / "search_index.json").read_text())["docs"]
    sections = [f"{found['title']} {found['text']}" for found in index if found["location"].split("#")[0] == page]
    beginnings = [rf"(?<!\w){re.escape(word)}" for word in query.split()]
    return any(all(re.search(begin, section, re.IGNORECASE) for begin in beginnings) for section in sections)


def problems() -> list[str]:
    pages = {path: Page(path) for path in SITE.rglob("*.html")}
    found = []
    text_of: dict[str, int] = {}
    for path, page in pages.items():
        where = path.relative_to(SITE)
        if where.parts[0] == "reference":
            text_of.update(page.text_of)
        found += [f"{where} fetches {address}" for address in page.fetched if urlsplit(address).netloc]
        if where.name == "404.html":
            continue  # its links are absolute
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{where} links to {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{where} links to {link}, which has no such anchor")
        if len(page.longest_line) > CODE_COLUMNS:
            found.append(f"{where} has a line of {len(page.longest_line)} characters of code: {page.longest_line}")
    found += [
        f"the search for {words!r} does not find {page}" for words, page in SEARCHES.items() if not hit(words, page)
    ]
    for name in sorted(public_names()):
        full = f"vescale_ckpt.{name}"  # of a module its members are shown
        shown = sum(count for at, count in text_of.items() if at == full or at.startswith(f"{full}."))
        if shown < 60:
            found.append(f"the reference shows {shown} characters of vescale_ckpt.{name}")
    return found


if __name__ == "__main__":
    wrong = problems()
    print("\n".join(wrong) or f"{len(list(SITE.rglob('*.html')))} pages, {len(public_names())} public names: fine")
    sys.exit(1 if wrong else 0)
