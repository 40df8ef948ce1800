"""What gpu_check.sh leaves: gpu.json, report.md and logs.txt, written again with every step.

All is kept in a folder of the working tree, so that a later call adds to it, and copied to `$OUT`, which may take eight
files only.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_plan import BATCHES, CALLS, NO_BATCHES

MOST_CHARACTERS = 11_000  # of report.md: the last 12,000 of an output are kept
MOST_LOG_BYTES = 15 << 20  # of logs.txt, of which 16 MiB are kept
LINES = 200  # of the log of a step that did not fail


@dataclass
class Result:
    name: str
    what: str
    status: str  #: begun, ok, failed, skipped
    why: str = ""
    seconds: float = 0.0
    began: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))  #: UTC


@dataclass(frozen=True)
class Row:
    """A line of the table: what has to be reached, or, without bounds, what is beside it."""

    number: str
    what: str
    figure: str
    least: float | None = None
    most: float | None = None

    def verdict(self, value: float) -> str:
        if self.wanted == "":
            return ""
        return "met" if self.met(value) else "missed"

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    @property
    def wanted(self) -> str:
        if self.least is not None:
            return f">= {self.least:g}"
        return "" if self.most is None else f"<= {self.most:g}"


ROWS = (
    Row("1", "device to host through the arena, of the pinned peak", "copy_large_of_peak", least=0.95),
    Row("2", "20,000 x 4 KiB, of the pinned peak", "copy_4k_of_peak", least=0.8),
    Row("2", "20,000 x 64 KiB", "copy_64k_of_peak", least=0.8),
    Row("2", "2,000 x 256 KiB", "copy_256k_of_peak", least=0.9),
    Row("2", "2,000 x 1 MiB", "copy_1m_of_peak", least=0.95),
    Row("2", "stock's pinned stager, for comparison: 20,000 x 4 KiB", "stock_copy_4k_of_peak"),
    Row("2", "stock's: 20,000 x 64 KiB", "stock_copy_64k_of_peak"),
    Row("2", "stock's: 2,000 x 256 KiB", "stock_copy_256k_of_peak"),
    Row("2", "stock's: 2,000 x 1 MiB", "stock_copy_1m_of_peak"),
    Row("3", "columns (8 KiB runs)", "copy_columns_of_peak", least=0.8),
    Row("3", "transposed", "copy_transposed_of_peak", least=0.6),
    Row("3", "fp8, fp4, conj, offsets and strides beyond 4 GiB: equal", "odd_equal", least=1),
    Row("4", "load, warm page cache, of the lesser of peak and read to the host", "load_of_lesser", least=0.9),
    Row("4", "the same, 20,000 x 64 KiB", "small_load_of_lesser", least=0.7),
    Row("5", "first save against steady ones", "first_save_of_steady", most=1.5),
    Row("5", "first save after prepare", "prepared_save_of_steady", most=1.05),
    Row("6", "stall of save(async), of bytes / peak", "stall_of_peak_time", most=1.1),
    Row("7", "stall with a gate, ms", "gate_stall_ms", most=5),
    Row("7", "99th percentile of a launch beside the copy, of without", "gate_launch_p99_ratio", most=2),
    Row("7", "the same beside the first copy of the process", "gate_launch_p99_cold_ratio", most=5),
    Row("8", "0.27B bf16 FSDP2 + AdamW, save every 10 steps: slower, %", "step_time_ours_slower_percent", most=3),
    Row("8", "the same behind a gate, %", "step_time_ours_gate_slower_percent", most=3),
    Row("8", "stock's async_save, for comparison, %", "step_time_stock_slower_percent"),
    Row("9", "synchronous save on the device, of host memory's speed", "save_of_host", least=0.9),
    Row("9", "load on the device, of host memory's speed", "load_of_host", least=0.9),
    Row("10", "device memory of ours while saving and after a load, MiB", "own_device_mib", most=64),
    Row("11", "growth over 200 saves: device memory, MiB", "growth_device_mib", most=1),
    Row("11", "growth: host memory, MiB", "growth_host_mib", most=32),
    Row("11", "growth: descriptors and threads", "growth_handles", most=0),
)


class Report:
    """The results and figures of all calls on a machine. `out`: where copies of the files go; `anew`: without those of
    earlier calls."""

    def __init__(self, folder: Path, out: Path | None = None, *, anew: bool = True) -> None:
        self.folder, self._out = folder, out
        self._logs = folder / "logs"
        self._lines = folder / "figures.jsonl"  # to which steps append
        self.results: dict[str, Result] = {}
        self.interrupted = ""
        if anew:
            self._lines.unlink(missing_ok=True)
            shutil.rmtree(self._logs, ignore_errors=True)
        elif (folder / "gpu.json").exists():
            earlier = json.loads((folder / "gpu.json").read_text())["steps"]
            self.results = {result["name"]: Result(**result) for result in earlier}
        self._logs.mkdir(parents=True, exist_ok=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        self._read = -1
        self.write()

    # --- What steps need and leave

    @property
    def environment(self) -> dict[str, str]:
        """Of a step that begins now."""
        batches = NO_BATCHES if self._batches_are_off() else {}
        return {"GPU_CHECK_FIGURES": str(self._lines), **batches}

    def _batches_are_off(self) -> bool:
        return BATCHES in self.results and self.results[BATCHES].status == "failed"

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def add(self, result: Result) -> None:
        """In place of an earlier one of the same step."""
        self.results.pop(result.name, None)
        self.results[result.name] = result
        self.write()

    def figures(self) -> dict[str, Any]:
        if not self._lines.exists():
            return {}
        figures: dict[str, Any] = {}
        for line in self._lines.read_text().splitlines():
            try:
                figures.update(json.loads(line))
            except ValueError:  # half of a line, of a step that was killed or still writes
                continue
        return figures

    # --- Files

    def refresh(self) -> None:
        """Writes again if there are more figures."""
        size = self._lines.stat().st_size if self._lines.exists() else 0
        if size != self._read:
            self._read = size
            self._write_figures()

    def write(self) -> None:
        self._write_figures()
        self._replace("logs.txt", self._all_logs())

    def _write_figures(self) -> None:
        steps = [asdict(result) for result in self.results.values()]
        data: dict[str, Any] = {"steps": steps, "figures": self.figures()}
        if self.interrupted:
            data["interrupted"] = self.interrupted
        self._replace("gpu.json", json.dumps(data, indent=1))
        self._replace("report.md", self.text())

    def _replace(self, name: str, text: str) -> None:
        for folder in filter(None, (self.folder, self._out)):
            (folder / f"{name}.new").write_text(text + "\n")
            os.replace(folder / f"{name}.new", folder / name)

    def _all_logs(self) -> str:
        """The end of each step's log, and all of it where the step failed, as far as there is room."""
        most = MOST_LOG_BYTES // max(1, len(self.results))
        parts = []
        for result in self.results.values():
            if not self.log(result.name).exists():
                continue
            with open(self.log(result.name), "rb") as file:
                file.seek(max(0, self.log(result.name).stat().st_size - most))
                lines = file.read(most).decode(errors="replace").splitlines()
            shown = lines if result.status == "failed" else lines[-LINES:]
            parts.append("\n".join([f"===== {result.name}: {result.status} {result.why}", *shown]))
        return "\n".join(parts)

    # --- The report

    def text(self) -> str:
        """As Markdown, with texts cut so short that all of it is at most `MOST_CHARACTERS`."""
        figures = self.figures()
        for width in (200, 120, 80, 50, 30, 15):
            text = self._text(figures, width)
            if len(text) <= MOST_CHARACTERS:
                return text
        return text[:MOST_CHARACTERS]

    def _text(self, figures: Mapping[str, Any], width: int) -> str:
        def cut(value: object) -> str:
            text = " ".join(str(value).replace("|", "/").split())
            return text if len(text) <= width else text[: width - 1] + "…"

        lines = ["# GPU check", "", str(figures.get("machine", "machine unknown"))[:200], ""]
        if self.interrupted:
            lines += [f"**{self.interrupted}**", ""]
        if self._batches_are_off():
            reason = cut(self.results[BATCHES].why)
            setting = " ".join(f"{name}={value}" for name, value in NO_BATCHES.items())
            lines += [f"**{BATCHES} failed ({reason}): the steps after it ran with {setting}**", ""]
        lines += ["| # | what | wanted | measured | |", "|---|---|---|---|---|"]
        for row in ROWS:
            value = figures.get(row.figure)
            known = isinstance(value, (int, float))
            told = f"{value:.3g}" if known else "not measured" if value is None else cut(value)
            verdict = row.verdict(float(value)) if known else ""  # type: ignore[arg-type]
            lines.append(f"| {row.number} | {row.what} | {row.wanted} | {told} | {verdict} |")
        lines += ["", "| step | result | s |", "|---|---|---|"]
        for result in self._in_order():
            why = f": {cut(result.why)}" if result.why else ""
            lines.append(f"| {result.name} | {result.status}{why} | {result.seconds:.0f} |")
        rows = {row.figure for row in ROWS}
        others = {name: value for name, value in figures.items() if name not in rows and name != "machine"}
        lines += ["", "Other figures:", *(f"- {name}: {cut(_short(value))}" for name, value in sorted(others.items()))]
        return "\n".join(lines)

    def _in_order(self) -> list[Result]:
        known = list(dict.fromkeys(step.name for call in CALLS for step in call.steps))
        return sorted(self.results.values(), key=lambda r: known.index(r.name) if r.name in known else len(known))


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
