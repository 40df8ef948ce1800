"""What sources keep to: C++ types are defined once (scripts/one_definition.py, a part of `make lint`), and the steps
that tests act before, behind or in place of are in the product."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness.steps import LIMITS, STEPS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "one_definition.py"

ONE = "#pragma once\nnamespace a::plan {\nstruct Piece {\n  int writer;\n};\n}  // namespace a::plan\n"
OTHER = ONE.replace("int writer", "long order")


@pytest.mark.parametrize(
    ("files", "finds"),
    [
        ({"plan/one.h": ONE, "route/other.h": OTHER.replace("::plan", "::route")}, ""),
        ({"plan/one.h": ONE, "plan/other.h": OTHER}, "redefinition of"),
        ({"plan/one.cpp": ONE.replace("#pragma once\n", "")}, "one.cpp:2: Piece belongs"),
        ({"plan/one.cpp": "namespace a {\nnamespace {\nstruct Piece {\n};\n}  // namespace\n}  // namespace a\n"}, ""),
    ],
)
def test_a_name_has_one_definition(files: dict[str, str], finds: str, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    result = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=120)
    assert (result.returncode != 0) == bool(finds), result.stderr
    assert finds in result.stderr


def test_every_step_and_limit_that_tests_name_is_there() -> None:
    named = {**STEPS, **LIMITS}
    assert [name for name, (owner, attribute) in named.items() if not hasattr(owner, attribute)] == []
