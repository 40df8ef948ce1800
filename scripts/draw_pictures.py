"""Draws the pictures of docs/pictures, or with --check fails if one of them is not as this script draws it.

Who writes what comes from a simulated plan, what lies in a directory from a real save. The other pictures are schemes.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
sys.path.insert(0, str(ROOT))

WIDTH = 600  # of every picture; pages show them at most this wide
SIZE = 14.0  # of text: still readable where a telephone shows the picture at two thirds

STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-size:14px;fill:#1c2833}
.mono{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:13px}
.bold{font-weight:600}.faint{fill:#5d6d7e}.ground{fill:#fdfdfd;stroke:#d5d8dc}
.blue{fill:#cfe2f7;stroke:#7fa8d6}.green{fill:#cdebd6;stroke:#79b98d}.amber{fill:#fbe3b8;stroke:#d9a94a}
.red{fill:#f6cfca;stroke:#d07f75}.grey{fill:#e8eaed;stroke:#aab1b9}.violet{fill:#e2d5f3;stroke:#a78bcf}
.gone{fill:none;stroke:#aab1b9;stroke-dasharray:5 4}
.line{stroke:#5d6d7e;stroke-width:1.5;fill:none}.head{fill:#5d6d7e}
@media (prefers-color-scheme:dark){
text{fill:#e5e8ec}.faint{fill:#a9b4c0}.ground{fill:#20242d;stroke:#3b424e}
.blue{fill:#27466b;stroke:#5f8fc4}.green{fill:#235238;stroke:#5aa676}.amber{fill:#604715;stroke:#c0923a}
.red{fill:#6a2f29;stroke:#c97b70}.grey{fill:#3a414c;stroke:#727c89}.violet{fill:#453563;stroke:#9579c2}
.gone{stroke:#727c89}.line{stroke:#a9b4c0}.head{fill:#a9b4c0}}
"""

# Widths of characters in DejaVu Sans, the widest of the usual fonts, in parts of the size of the text.
_WIDTHS = {
    **dict.fromkeys("ijl'", 0.28),
    **dict.fromkeys(" .,|()/:;[]ft-", 0.39),
    **dict.fromkeys("rs", 0.5),
    **dict.fromkeys("mMwW%", 0.95),
    **dict.fromkeys("ABCDEFGHIJKLNOPQRSTUVXYZ+=<>", 0.74),
}


def width(text: str, mono: bool = False, bold: bool = False) -> float:
    """At least the width of the text in pixels."""
    if mono:
        return len(text) * 0.61 * 13
    return sum(_WIDTHS.get(letter, 0.63) for letter in text) * SIZE * (1.08 if bold else 1.0)


class Picture:
    """A picture in SVG. Raises if a text would leave the picture or its box, or would overlap another text."""

    def __init__(self, height: int, title: str) -> None:
        self.height = height
        self._title = title
        self._parts: list[str] = []
        self._texts: list[tuple[float, float, float, float, str]] = []
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "ground", radius=8)

    def box(self, x: float, y: float, w: float, h: float, kind: str, text: str = "", radius: int = 4) -> None:
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius}"/>')
        if text:
            if width(text) > w - 4:
                raise ValueError(f"{text!r} does not fit {w:g} pixels: {width(text):.0f}")
            self.text(x + w / 2, y + h / 2 + SIZE * 0.35, text, anchor="middle")

    def text(
        self, x: float, y: float, text: str, style: str = "", anchor: str = "start", on: str | None = None
    ) -> None:
        mono, bold = "mono" in style, "bold" in style
        long = width(text, mono, bold)
        left = x - {"start": 0.0, "middle": long / 2, "end": long}[anchor]
        place = (left, y - SIZE * 0.8, left + long, y + SIZE * 0.25, text)
        if left < 4 or left + long > WIDTH - 4 or place[1] < 2 or place[3] > self.height - 2:
            raise ValueError(f"{text!r} leaves the picture: {left:.0f} to {left + long:.0f}, line {y:g}")
        for other in self._texts:
            if place[0] < other[2] and other[0] < place[2] and place[1] < other[3] and other[1] < place[3]:
                raise ValueError(f"{text!r} overlaps {other[4]!r}")
        self._texts.append(place)
        shown = f' class="{style}"' if style else ""
        held = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text{shown} x="{x:g}" y="{y:g}"{held} xml:space="preserve">{escape(text)}</text>')

    def line(self, *points: tuple[float, float], arrow: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if arrow else ""
        self._parts.append(f'<polyline class="line" points="{path}"{end}/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img"><title>{escape(self._title)}</title><style>{STYLE}</style>'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
        )
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"


def time_line() -> Picture:
    """When training stands still, by way of saving."""
    picture = Picture(452, "Time lines of a synchronous save, an asynchronous save, and one with a gate")

    def lane(y: float, blocks: list[tuple[float, str, str]]) -> None:
        x = 14.0
        for long, kind, text in blocks:
            if kind:
                picture.box(x, y, long, 30, kind, text)
            x += long

    top = 14
    picture.text(14, top + 14, "save(path, state)", "bold")
    lane(top + 24, [(64, "blue", "step"), (64, "blue", "step"), (312, "amber", "training stands still"),
                    (64, "blue", "step"), (64, "blue", "step")])  # fmt: skip
    lane(top + 60, [(128, "", ""), (56, "grey", "plan"), (160, "green", "write, sync"), (96, "green", "commit")])
    picture.text(462, top + 80, "save returns", "faint")

    top = 140
    picture.text(14, top + 14, "save(…, async_checkpoint=True)", "bold")
    lane(top + 24, [(64, "blue", "step"), (64, "blue", "step"), (116, "amber", "plan, copy")]
         + [(64, "blue", "step")] * 5)  # fmt: skip
    lane(top + 60, [(244, "", ""), (190, "green", "write, sync"), (96, "green", "commit")])
    picture.line((258, top + 92), (258, top + 104))
    picture.text(258, top + 118, "save returns", "faint", "middle")
    picture.line((544, top + 92), (544, top + 104))
    picture.text(586, top + 118, "handle.result() returns", "faint", "end")

    top = 284
    picture.text(14, top + 14, "save(…, async_checkpoint=True, gate=optimizer)", "bold")
    lane(top + 24, [(64, "blue", "step"), (64, "blue", "step"), (56, "amber", "plan"),
                    (148, "blue", "forward, backward"), (36, "amber", ""), (76, "blue", "update"),
                    (64, "blue", "step"), (64, "blue", "step")])  # fmt: skip
    lane(top + 60, [(184, "", ""), (184, "violet", "copy"), (120, "green", "write, sync"), (84, "green", "commit")])
    picture.line((198, top + 92), (198, top + 104))
    picture.text(198, top + 118, "save returns", "faint", "middle")
    picture.text(586, top + 118, "the next update waits for the copy", "faint", "end")
    picture.line((350, top + 92), (350, top + 104))
    picture.text(14, top + 152, "Upper rows: training. Lower rows: the save. Not to scale.", "faint")
    return picture


def directory() -> Picture:
    """The files of a checkpoint that a manager has saved, and the inside of its data file."""
    import torch

    import vescale_ckpt

    torch.manual_seed(0)
    weight = torch.randn(1024, 1024)
    state = {"model": {"weight": weight, "bias": torch.randn(1024), "scale": torch.randn(16)}, "step": 20}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with vescale_ckpt.CheckpointManager(run, best="loss", best_mode="min") as manager:
            manager.save(20, state, metrics={"loss": 0.5})
        checkpoint = run / "step-20"
        names = sorted(path.name for path in checkpoint.iterdir())
        info = vescale_ckpt.inspect(checkpoint)
    (data,) = info.files
    about = {
        ".metadata": "what is stored, and where: the commit",
        ".metadata.index": "the same in tables, for loads",
        data: "data of rank 0; 8 random digits",
        "metrics.json": "metrics of the manager",
        ".lock": "locked while a manager saves",
    }
    order = [".metadata", ".metadata.index", data, "metrics.json", ".lock"]
    if sorted(order) != names:
        raise ValueError(f"the directory holds {names}")
    shown = {data: re.sub(r"[0-9a-f]{8}", "5f0c21ab", data)}
    records = [(chunk.offset, chunk.bytes, key) for key, tensor in info.tensors.items() for chunk in tensor.chunks]
    records += [(thing.offset, thing.bytes, key) for key, thing in info.objects.items()]
    records.sort()

    rows = len(order)
    picture = Picture(
        176 + 26 * rows + 34 * (len(records) + 1), "The files of a checkpoint, and the inside of a data file"
    )
    picture.text(14, 28, "run/step-20/", "mono bold")
    for number, name in enumerate(order):
        y = 54 + 26 * number
        picture.line((22, 36), (22, y - 4), (32, y - 4))
        picture.text(38, y, shown.get(name, name), "mono")
        picture.text(WIDTH - 14, y, about[name], "faint", "end")
    top = 54 + 26 * rows + 14
    picture.text(14, top + 10, f"Inside {shown[data]}: {info.files[data]:,} bytes", "bold")
    picture.text(14, top + 34, "record", "faint")
    picture.text(400, top + 34, "offset", "faint", "end")
    picture.text(WIDTH - 14, top + 34, "bytes", "faint", "end")
    y = top + 42
    for offset, length, key in records:
        picture.box(14, y, 270, 28, "violet" if key in info.objects else "green", key)
        picture.text(400, y + 19, f"{offset:,}", "mono", "end")
        picture.text(WIDTH - 14, y + 19, f"{length:,}", "mono", "end")
        y += 34
    picture.box(14, y, 270, 28, "grey", "checksums of all blocks")
    picture.text(WIDTH - 14, y + 19, "to the end of the file", "faint", "end")
    picture.text(14, y + 54, "Each record is an archive of torch.save. Zeros lie between records.", "faint")
    return picture


def who_writes() -> Picture:
    """The bytes that each rank writes of a replicated model, as the planner decides."""
    import torch

    from benchmarks.planning.models import MODELS
    from benchmarks.planning.simulated_job import Parallelism, SimulatedState, gather, planned
    from vescale_ckpt._engine.rows import PLAN_ROW, words

    ranks = 8
    entries = MODELS["llama-1b"].entries(torch.bfloat16)
    state = SimulatedState(entries, Parallelism(ranks=ranks))
    picture = Picture(366, "The bytes that each of eight ranks writes of a model that all of them hold")
    picture.text(14, 28, "Llama 1B in bfloat16, whole on each of 8 ranks (DDP)", "bold")
    left, room = 74, 400
    sizes: list[dict[str, int]] = []
    pieces: list[str] = []
    for part in planned(gather(state).inventories, "balanced")[1]:
        rows, of, piece = words(part), {"embedding": 0, "layers": 0}, ""
        for item, dim, start, length in zip(*(rows[column::PLAN_ROW] for column in range(PLAN_ROW)), strict=True):
            entry = entries[item]
            shape = [length if number == dim else extent for number, extent in enumerate(entry.shape)]
            of["embedding" if "embed" in entry.name else "layers"] += 2 * math.prod(shape)
            if "embed" in entry.name:
                piece = f"rows {start:,} to {start + length - 1:,}"
        sizes.append(of)
        pieces.append(piece)
    most = max(sum(of.values()) for of in sizes)
    y = 40
    for rank, of in enumerate(sizes):
        picture.text(14, y + 20, f"rank {rank}")
        x = float(left)
        for name, size in of.items():
            wide = room * size / most
            if wide >= 1:
                text = "embedding" if name == "embedding" else "matrices and norms of the layers"
                fits = width(text) < wide - 4
                picture.box(x, y + 2, wide, 26, "blue" if name == "embedding" else "green", text if fits else "")
            x += wide
        picture.text(WIDTH - 14, y + 20, f"{sum(of.values()) / 1e6:,.1f} MB", "", "end")
        y += 33
    whole = sum(sum(of.values()) for of in sizes) / 1e6
    picture.text(14, y + 22, f"The embedding is cut: rank 1 writes {pieces[1]}.", "faint")
    picture.text(14, y + 42, f"All ranks together write {whole:,.1f} MB, each byte once.", "faint")
    return picture


def commit() -> Picture:
    """What the directory holds at each instant of a save over an older checkpoint."""
    picture = Picture(366, "A save step by step: the rename of .metadata is the commit")
    picture.text(14, 28, "Saving over an older checkpoint", "bold")
    picture.text(WIDTH - 14, 28, "a load finds", "faint", "end")
    steps = [
        ("before", "blue", "blue", "", "", "old"),
        ("data is written, synced", "blue", "blue", "green", "", "old"),
        (".metadata.tmp is synced", "blue", "blue", "green", "green", "old"),
        ("rename: the commit", "green", "gone", "green", "", "new"),
        ("old files are removed", "green", "", "green", "", "new"),
    ]
    for number, (what, metadata, old, new, temporary, found) in enumerate(steps):
        y = 42 + 62 * number
        picture.text(14, y + 30, f"{number + 1}")
        picture.text(32, y + 17, what)
        x = 32
        for kind, text, wide in (
            (metadata, ".metadata", 88),
            (old, "old data", 84),
            (new, "new data", 84),
            (temporary, ".metadata.tmp", 124),
        ):
            if kind:
                picture.box(x, y + 25, wide, 26, kind, text)
            x += wide + 8
        picture.box(WIDTH - 84, y + 25, 70, 26, "green" if found == "new" else "blue", found)
        if number == 3:
            picture.line((14, y - 1), (WIDTH - 14, y - 1))
    return picture


def broadcast() -> Picture:
    """Who reads which quarter of bytes that four ranks on two nodes all need."""
    picture = Picture(468, "Four ranks on two nodes load bytes that all of them need, without and with broadcast")
    colours = ("blue", "green", "amber", "violet")

    def panel(top: float, title: str, note: str, shared: bool) -> None:
        picture.text(14, top + 14, title, "bold")
        picture.text(14, top + 34, note, "faint")
        for node in range(2):
            picture.box(14 + 292 * node, top + 44, 280, 72, "ground")
            picture.text(24 + 292 * node, top + 61, f"node {node}", "faint")
            for local in range(2):
                rank = 2 * node + local
                x = 24 + 292 * node + 136 * local
                picture.box(x, top + 68, 124, 40, "gone")
                picture.text(x + 8, top + 93, f"rank {rank}")
                for piece in range(4):
                    kind = colours[piece] if not shared or piece == rank else "gone"
                    picture.box(x + 60 + 15 * piece, top + 78, 13, 20, kind, radius=2)
                if shared:
                    picture.line((x + 66.5 + 15 * rank, top + 168), (x + 66.5 + 15 * rank, top + 102), arrow=True)
            if not shared:
                for local in range(2):
                    x = 24 + 292 * node + 136 * local + 89
                    picture.line((x, top + 168), (x, top + 102), arrow=True)
        if shared:
            picture.text(333, top + 136, "each sends its own", "faint", "middle")
            picture.line((333, top + 146), (404, top + 146), arrow=True)
            picture.line((333, top + 146), (262, top + 146), arrow=True)
        picture.box(14, top + 172, WIDTH - 28, 32, "grey")
        picture.text(24, top + 193, "storage")
        for piece, kind in enumerate(colours):
            picture.box(110 + 118 * piece, top + 177, 112, 22, kind, f"piece {piece}")

    panel(14, "broadcast_checkpoint=False", "Each rank reads all that it needs: here 4 times the stored bytes.", False)
    panel(240, "broadcast_checkpoint=True", "Each byte is read once, by one rank, which sends it to the others.", True)
    return picture


def failures() -> Picture:
    """What a load finds after a save was killed, by the instant."""
    picture = Picture(336, "What a load finds after a save was killed, by the instant at which it was")
    picture.text(14, 28, "A save is killed …", "bold")
    phases = [
        ("plan", "grey", "nothing"),
        ("write, sync", "green", "data files that nothing names"),
        (".metadata.tmp", "green", "the same, and a .metadata.tmp file"),
        ("clean up", "violet", "some of the old data files"),
    ]
    wides = (70, 150, 140, 212)
    x = 14.0
    for (text, kind, _), wide in zip(phases, wides, strict=True):
        picture.box(x, 42, wide, 32, kind, text)
        x += wide
    renamed = 14 + sum(wides[:3])
    picture.line((renamed, 36), (renamed, 112))
    picture.text(renamed - 6, 95, "rename", "bold", "end")
    picture.box(14, 112, renamed - 14, 30, "blue", "a load finds the old checkpoint, whole")
    picture.box(renamed, 112, wides[3], 30, "green", "the new one, whole")
    picture.text(14, 174, "killed in", "faint")
    picture.text(150, 174, "left on disk until the next save has cleaned up", "faint")
    for number, (text, kind, left) in enumerate(phases):
        y = 184 + 36 * number
        picture.box(14, y, 120, 28, kind, text)
        picture.text(150, y + 19, left)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "time_line": time_line,
    "directory": directory,
    "who_writes": who_writes,
    "commit": commit,
    "broadcast": broadcast,
    "failures": failures,
}


def main(arguments: list[str]) -> int:
    changed = []
    for name, draw in PICTURES.items():
        path = FOLDER / f"{name}.svg"
        text = draw().svg()
        if not path.exists() or path.read_text() != text:
            changed.append(path.name)
            if arguments != ["--check"]:
                path.write_text(text)
    if arguments == ["--check"] and changed:
        print(f"not as {Path(__file__).name} draws them: {', '.join(changed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
