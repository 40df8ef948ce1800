"""Runs the command `settings`, which lists all settings and where each value comes from."""

from __future__ import annotations

import os
from argparse import Namespace

from .. import settings
from . import output
from .output import FINE, UNUSABLE


def run(options: Namespace) -> int:
    rows, wrong = [], False
    for setting in settings.SETTINGS.values():
        text, source = os.environ.get(setting.variable), "default"
        value: object = settings.lenient(setting.name)
        if setting.memory_part and value != setting.default:
            source = settings.SETTINGS["memory_bytes"].variable
        error = ""
        if text is not None:
            source = "environment"
            try:
                value = setting.parse(text)
            except ValueError as raised:
                value, error, wrong = text, str(raised), True
        rows.append(
            {
                "variable": setting.variable,
                "value": value,
                "source": source,
                "default": setting.default,
                "help": setting.help,
                "error": error,
            }
        )
    unknown = settings.unknown()
    if options.json:
        output.print_json("settings/1", {"settings": rows, "unknown": unknown})
    else:
        table = [(str(row["variable"]), str(row["value"]), str(row["source"]), str(row["help"])) for row in rows]
        output.print_table(("variable", "value", "from", "what it is"), table, right=("value",), lead=3)
        for row in rows:
            if row["error"]:
                print(f"wrong: {row['error']}")
        for name in unknown:
            print(f"{name} is no setting, and does nothing")
    return UNUSABLE if wrong else FINE
