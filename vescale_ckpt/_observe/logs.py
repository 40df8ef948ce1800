"""Sets up logging to standard error as `VESCALE_CKPT_LOG` asks, for programs that do not set up logging."""

from __future__ import annotations

import logging
import os

from .. import settings

_package = logging.getLogger(__name__.partition(".")[0])
_handler: logging.Handler | None = None


class _WithRank(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.rank = os.environ.get("RANK", "0")
        return super().format(record)


def set_up() -> None:
    """Called at the beginning of each save and load. The setting counts at its first call with one."""
    global _handler
    level = str(settings.lenient("log"))
    if level == "off" or _handler is not None:
        return
    _handler = logging.StreamHandler()
    _handler.setFormatter(_WithRank("%(asctime)s vescale_ckpt [rank %(rank)s] %(levelname)s %(message)s"))
    _package.addHandler(_handler)
    _package.setLevel(level.upper())
    _package.propagate = False
