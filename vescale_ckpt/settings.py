"""Reads the package's settings from environment variables, and validates arguments of public functions.

All environment variables are read and checked when a save or load begins. Arguments of the call take precedence.
"""

from __future__ import annotations

import difflib
import logging
import math
import operator
import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

logger = logging.getLogger(__name__)

PREFIX = "VESCALE_CKPT_"

MiB = 1 << 20
_LEVELS = ("off", "debug", "info", "warning", "error")
_UNITS = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_LONGEST = 10**9  # seconds: 31 years; much larger values overflow


@dataclass(frozen=True)
class Setting:
    """One row of the table. `least` and `most` bound a number. `choices` lists the allowed strings (empty: any)."""

    name: str
    default: int | str
    help: str
    least: int = 0
    most: int = 1 << 62
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def parse(self, text: str) -> int | str:
        if isinstance(self.default, str):
            if self.choices and text not in self.choices:
                raise ValueError(f"{self.variable}: expected one of {', '.join(self.choices)}, got {text!r}")
            return text
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{self.variable}: expected a whole number, got {text!r}") from None
        if value < self.least:
            raise ValueError(f"{self.variable}: expected at least {self.least}, got {text!r}")
        if value > self.most:
            raise ValueError(f"{self.variable}: expected at most {self.most}, got {text!r}")
        return value


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "threads",
            0,
            "worker threads of each save or load; a load of many small pieces uses twice as many. 0: this rank's "
            "share of the cores that it may run on, at least 4, at most 16",
            most=256,
        ),
        Setting("memory_bytes", 256 * MiB, "memory for reading and writing; determines three limits", least=4 * MiB),
        Setting("direct_io", "auto", "whether files bypass the page cache", choices=("auto", "on", "off")),
        Setting("snapshot_bytes", 0, "memory limit for snapshots per process; 0: half of the free memory, per rank"),
        Setting("copy_batches", 1, "0: one call per copy from or to a CUDA device", most=1),
        Setting("exit_timeout", 600, "seconds that an ending process waits for its asynchronous saves", most=_LONGEST),
        Setting("alone", 0, "1: allows one of several processes to save without torch.distributed", most=1),
        Setting("object_store_requests", 16, "concurrent requests of a save or load to an object store", 1, 256),
        Setting("object_store_timeout", 300, "seconds for a request to an object store, with all retries", 1, 3600),
        Setting("timeout", 1800, "seconds that a rank waits for other ranks, in each step", least=1, most=_LONGEST),
        Setting("log", "off", "prints the package's log from this level up to standard error", choices=_LEVELS),
        Setting("progress", 0, "1: rank 0 shows the progress of saves and loads on standard error", most=1),
        Setting("trace", "", "directory for traces of all ranks, in Chrome's trace format; empty: none"),
        Setting("report_seconds", 30, "seconds between reports of a step that takes longer", least=1, most=_LONGEST),
    )
}

MOST_THREADS = SETTINGS["threads"].most
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS.values()}
_NODE = PREFIX + "NODE"  # its default is not a constant: see _ranks/node.py
# Prefixes of variables that builds and tests use.
_NOT_SETTINGS = tuple(PREFIX + name for name in ("NO_NVCC", "WERROR", "TEST_", "FUZZ_"))
_warned: set[str] = set()

DirectIO = Literal["auto"] | bool
Broadcast = Literal["auto"] | bool
Placement = Literal["balanced", "lowest_rank", "local"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


def value(name: str) -> int | str:
    """Returns a setting from the environment, or its default. Raises ValueError if the variable is invalid."""
    setting = SETTINGS[name]
    text = os.environ.get(setting.variable)
    if text is not None:
        return setting.parse(text)
    return setting.default


def lenient(name: str) -> int | str:
    """Returns a setting, or its default if the environment variable is invalid. For values that a rank needs before
    `check` raises on all ranks."""
    try:
        return value(name)
    except ValueError:
        return SETTINGS[name].default


def ranks_of_this_node(otherwise: int) -> int:
    """Returns `LOCAL_WORLD_SIZE`, which the launcher sets, if it is a positive number; otherwise `otherwise`."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else otherwise


def number(name: str) -> int:
    result = value(name)
    assert isinstance(result, int)
    return result


def broadcast_bytes() -> int:
    """Returns the memory limit, in bytes, for what a rank reads for other ranks."""
    return max(SETTINGS["memory_bytes"].least, number("memory_bytes") // 2)


def node() -> int | None:
    """Returns the number of this machine from the environment; None if not set. Raises ValueError if it is not a
    number."""
    text = os.environ.get(_NODE)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 63:
        raise ValueError(f"{_NODE}: expected a whole number below 2**63, got {text!r}")
    return int(text)


def check() -> None:
    """Raises ValueError if the environment variable of any setting is invalid, even if it is not used. Warns once per
    process of each variable with the prefix that is not a setting."""
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        if (setting := _BY_VARIABLE.get(name)) is not None:
            setting.parse(os.environ[name])
        elif name == _NODE:
            node()
        elif not name.startswith(_NOT_SETTINGS) and name not in _warned:
            _warned.add(name)
            similar = difflib.get_close_matches(name, [*_BY_VARIABLE, _NODE], 1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            logger.warning("the environment variable %s is no setting, and does nothing.%s", name, hint)


def timeout(argument: float | None) -> float:
    """Returns the seconds to wait for other ranks: `argument`, or the setting if it is None."""
    seconds = checked_seconds("timeout", argument, zero=False)
    return float(lenient("timeout")) if seconds is None else min(seconds, _LONGEST)


def broadcast(argument: Broadcast) -> Broadcast:
    """Returns `argument`. Raises ValueError if it is not a valid `broadcast_checkpoint`."""
    if argument != "auto" and not isinstance(argument, bool):
        raise ValueError(f"broadcast_checkpoint: expected 'auto', True or False, got {argument!r}")
    return argument


# --- Arguments of public functions: each check raises a ValueError with the argument and its allowed values


def checked_flag(name: str, value: object) -> bool:
    """Returns `value` if it is a bool; otherwise raises ValueError, because a string such as "no" would count as
    true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return value


def checked_count(name: str, value: object, most: int | None = None) -> int | None:
    """Returns `value` if it is a count of at least 1, or None; otherwise raises ValueError."""
    if value is None:
        return None
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or (most is not None and number > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"{name}: expected a whole number {allowed}, or None, got {value!r}")
    return number


def checked_bytes(name: str, value: object) -> int:
    """Returns bytes from a number, or from a string with a unit: "5GB" (powers of 1000, as in Hugging Face), "5GiB"
    (powers of 1024). Raises ValueError for anything else, and for less than 1."""
    count = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value, re.IGNORECASE)):
        unit = _UNITS.get(found[2].upper() if found[2].upper() != "B" else "")
        count = None if unit is None else int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
    if count is None or count < 1:
        raise ValueError(f"{name}: expected bytes, or text like '5GB' or '500MiB', got {value!r}")
    return count


def checked_seconds(name: str, value: object, *, zero: bool) -> float | None:
    """Returns `value` as seconds, or None. `zero`: whether 0 is allowed. Raises ValueError for other values."""
    if value is None:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise ValueError(f"{name}: expected seconds{'' if zero else ', more than 0'}, or None, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def checked_path(name: str, value: object) -> str | os.PathLike[str]:
    """Returns `value`. Raises ValueError if it is not a path, or is empty."""
    if not isinstance(value, (str, os.PathLike)):
        hint = f"; as bytes it is os.fsdecode({name})" if isinstance(value, bytes) else ""
        raise ValueError(f"{name}: expected a path, got {type(value).__name__}{hint}")
    if not os.fspath(value):
        raise ValueError(f"{name}: expected a path, got an empty text (the working directory is '.')")
    return value
