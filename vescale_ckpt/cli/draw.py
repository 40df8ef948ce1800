"""Draws the pictures of `--plot FILE` with matplotlib, which is an extra."""

from __future__ import annotations

import io
import os
from typing import Any

from .._storage.open_storage import checkpoint_path, is_folder, storage_at
from .output import clean

FORMATS = ("png", "svg", "pdf")
OURS_COLOUR, OTHER_COLOUR, DISK_COLOUR = "#1f6f8b", "#c9803a", "#9aa5ab"


def check(path: str | None) -> None:
    """Raises ValueError if no picture could be written to `path`. Called before a command works for long."""
    if path is None:
        return
    if path.rpartition(".")[2].lower() not in FORMATS:
        raise ValueError(f"--plot: expected a name that ends in .{', .'.join(FORMATS)}, got {path}")
    directory = os.path.dirname(checkpoint_path(path))
    if not is_folder(directory):
        raise FileNotFoundError(f"--plot {path}: {directory} is no directory")
    _library()


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes."""
    drawn, axes = _library().subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return drawn, axes


def plain(text: str) -> str:
    """Text in which matplotlib sees no formula, and no control character."""
    return clean(text).replace("$", r"\$")


def write(drawn: Any, path: str) -> None:
    """Writes a figure, whole or not at all."""
    content = io.BytesIO()
    drawn.savefig(content, format=path.rpartition(".")[2].lower(), dpi=150)
    _library().close(drawn)
    directory, name = os.path.split(checkpoint_path(path))
    storage_at(directory).write(name, content.getvalue())


def _library() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError('--plot needs matplotlib, which is not installed: pip install "vescale_ckpt[plot]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
