"""The pages of docs/ name files and messages that exist, their code runs, and generated ones are up to date."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import vescale_ckpt
from vescale_ckpt import errors, integrations, reports

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, README, ROOT / "CONTRIBUTING.md"]
COMMANDS = ROOT / "docs" / "commands.md"  # its examples name checkpoints that are not there
RANKS = ROOT / "docs" / "howto" / "ranks.md"
TIMEOUT = 200  # seconds, for pages to run on a busy machine
_PATH = re.compile(r"`((?:csrc|tests|scripts|benchmarks|examples|docs|vescale_ckpt|_[a-z]+|manager)/[\w/.-]*)`")
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def exists(page: Path, path: str) -> bool:
    places = [ROOT / path, ROOT / "vescale_ckpt" / path, page.parent / path]
    return any(
        place.exists() or place.with_suffix(".h").exists() or place.with_suffix(".py").exists() for place in places
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    named = _PATH.findall(text) + _LINK.findall(_CODE.sub("", text))
    assert [path for path in named if not exists(page, path)] == []


def test_the_design_is_told_in_150_lines() -> None:
    assert len((ROOT / "docs" / "design.md").read_text().splitlines()) <= 150


def test_the_readme_is_one_screen() -> None:
    assert len(README.read_text().splitlines()) <= 64


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    sources = [*(ROOT / "vescale_ckpt").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]*"), ROOT / "setup.py"]
    code = "".join(path.read_text() for path in sources)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # texts over several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    titles = re.findall(r"^### (.*)$", page, re.MULTILINE)
    messages = [text for title in titles for text in re.findall(r'"(.+?)"(?:,|$)', title)]
    quoted = [part.strip() for text in messages for part in re.split(r"…|\bN\b|%[sd]", text)]
    assert len(messages) > 30
    assert [part for part in quoted if part and part not in code] == []


# --- What is generated


@pytest.mark.parametrize("script", ["write_commands_page", "write_promises_table", "write_settings_page"])
def test_the_page_of_a_script_is_up_to_date(script: str) -> None:
    command = [sys.executable, ROOT / "scripts" / f"{script}.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_pictures_are_as_the_script_draws_them(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "scripts" / "draw_pictures.py"))["main"]
    assert main(["--check"]) == 0, capsys.readouterr().err
    drawn = {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    used = set(re.findall(r"pictures/(\w+\.svg)", "".join(page.read_text() for page in DOCS)))
    assert drawn == used


def test_every_public_name_has_a_place_in_the_reference_and_a_text() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    names = {f"vescale_ckpt.{name}" for name in vescale_ckpt.__all__}
    names |= {f"vescale_ckpt.integrations.{name}" for name in integrations.__all__}
    for module in (reports, errors):
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                public = name in vescale_ckpt.__all__
                names.add(f"vescale_ckpt.{name}" if public else f"{module.__name__}.{name}")
    assert shown == names
    assert [name for name in vescale_ckpt.__all__ if not getattr(vescale_ckpt, name).__doc__] == []


def test_the_changelog_names_pages_without_links() -> None:
    """It is a page of the site, too, where pages lie elsewhere."""
    assert re.findall(r"\]\((?!https:)[^)]*\)", (ROOT / "CHANGELOG.md").read_text()) == []


# --- Code


def run_pages(directory: Path, *arguments: str | Path, **variables: object) -> str:
    """Runs the code of pages in a process of its own. Returns what it has printed."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("run_pages.py"), *arguments]
    log = directory / "log"
    with log.open("w") as output:  # a file, which a process that is killed leaves
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        status: int | None = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        status = None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert status == 0, log.read_text()
    return log.read_text()


def test_the_code_of_the_pages_runs(tmp_path: Path) -> None:
    """In one process, because importing torch costs more than any page."""
    output = run_pages(tmp_path, *[page for page in [*DOCS, README] if page not in (COMMANDS, RANKS)])
    assert "different" in output and "sound:" in output  # the commands have run


# These index a `Sequential`, which torch types as a union, or give keywords as a dict.
UNTYPED = {"asynchronous.md", "export.md", "manager.md", "partial.md", "ranks.md", "tiers.md"}


def test_type_checkers_take_the_code_of_the_pages(tmp_path: Path) -> None:
    """mypy --strict, as a user would run it; but examples need not annotate their functions, and torch, which takes
    most of the time, is anything at all."""
    pytest.importorskip("mypy")
    for page in [*DOCS, README]:
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        if blocks and page.name not in UNTYPED:
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
            (tmp_path / f"{name}.py").write_text("\n".join(blocks))
    assert len(list(tmp_path.iterdir())) >= 8
    wrong = 'import vescale_ckpt\n\nvescale_ckpt.save("a", {}, format="safetensor")\n'
    (tmp_path / "wrong_format.py").write_text(wrong)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    options = ["--strict", "--implicit-reexport", "--follow-imports=silent", "--no-incremental"]
    options += ["--ignore-missing-imports", "--allow-subclassing-any", "--allow-untyped-decorators"]
    options += ["--disable-error-code=no-untyped-def", "--disable-error-code=no-untyped-call"]
    command = [sys.executable, "-m", "mypy", *options, *sorted(path.name for path in tmp_path.glob("*.py"))]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1 and errors[0].startswith("wrong_format.py:3") and "Literal" in errors[0], found.stdout


def test_the_page_for_many_ranks_runs_on_two(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has it
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    run_pages(tmp_path, "--ranks", "2", RANKS, **port)


def test_every_block_has_a_language_that_this_test_knows() -> None:
    """So that no example escapes by being called `py` or `bash`."""
    for page in PAGES:
        languages = re.findall(r"^```(\w*)\n.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        assert set(languages) <= {"python", "sh", ""}, page
