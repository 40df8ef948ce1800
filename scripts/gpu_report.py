"""What gpu_check.sh leaves: gpu.json and report.md, written again with every figure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Result:
    name: str
    what: str
    status: str  #: ok, failed, skipped
    why: str = ""
    seconds: float = 0.0


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
    Row("1", "device to host through the arena, of the pinned peak", "arena_of_peak", least=0.95),
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
    Row("8", "1B bf16 FSDP2 + AdamW, save every 10 steps: slower, %", "step_time_ours_slower_percent", most=3),
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
    """gpu.json and report.md in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: list[Result] = []
        self._lines = folder / "figures.jsonl"  # to which steps append
        self._lines.unlink(missing_ok=True)
        self._read = -1
        self.interrupted = ""
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

    def refresh(self) -> None:
        """Writes gpu.json again if there are more figures."""
        size = self._lines.stat().st_size if self._lines.exists() else 0
        if size != self._read:
            self._read = size
            self.write()

    def write(self) -> None:
        figures = self.figures()
        data = {"steps": [asdict(result) for result in self.results], "figures": figures}
        self._replace(
            "gpu.json", json.dumps(data | ({"interrupted": self.interrupted} if self.interrupted else {}), indent=1)
        )
        self._replace("report.md", self._text(figures))

    def _replace(self, name: str, text: str) -> None:
        (self.folder / f"{name}.new").write_text(text + "\n")
        os.replace(self.folder / f"{name}.new", self.folder / name)

    def _text(self, figures: Mapping[str, Any]) -> str:
        lines = ["# GPU check", "", str(figures.get("machine", "machine unknown")), ""]
        if self.interrupted:
            lines += [f"**{self.interrupted}**", ""]
        lines += ["| step | what | result | s |", "|---|---|---|---|"]
        for result in self.results:
            why = f": {result.why}" if result.why else ""
            lines.append(f"| {result.name} | {result.what} | {result.status}{why} | {result.seconds:.0f} |")
        lines += ["", "| # | what | wanted | measured | |", "|---|---|---|---|---|"]
        for row in ROWS:
            value = figures.get(row.figure)
            known = isinstance(value, (int, float))
            told = f"{value:.3g}" if known else "not measured"
            verdict = row.verdict(float(value)) if known else ""  # type: ignore[arg-type]
            lines.append(f"| {row.number} | {row.what} | {row.wanted} | {told} | {verdict} |")
        others = {name: value for name, value in figures.items() if name not in {row.figure for row in ROWS}}
        lines += ["", "| figure | |", "|---|---|", *(f"| {name} | {value} |" for name, value in sorted(others.items()))]
        return "\n".join(lines)
