"""A plugin of pytest that writes each test's outcome as a line of JSON as soon as it is known, for `run.py`."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    with open(os.environ["VESCALE_CKPT_UPSTREAM_RECORD"], "a") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "text": report.longreprtext}) + "\n")


def pytest_collectreport(report: Any) -> None:
    if report.outcome == "failed":
        with open(os.environ["VESCALE_CKPT_UPSTREAM_RECORD"], "a") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": "failed", "text": report.longreprtext}) + "\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Notes all tests first: those without an outcome did not end in time."""
    with open(os.environ["VESCALE_CKPT_UPSTREAM_RECORD"], "a") as file:
        for item in items:
            file.write(json.dumps({"test": item.nodeid, "outcome": "did not end", "text": ""}) + "\n")
