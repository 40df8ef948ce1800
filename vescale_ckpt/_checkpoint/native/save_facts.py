"""Writes into the id of a save when, by how many ranks and with which versions it was made, and reads it from there.

The id is a text that readers compare and never look into, of stock DCP neither, and both `.metadata` and its index have
it. So nothing else is written or read, and older versions read such checkpoints (docs/format.md).
"""

from __future__ import annotations

import json
from datetime import datetime, timezone

from ..._version import VERSION
from ...reports import SavedBy


def stamped(save_id: str, ranks: int) -> str:
    """Returns the id of a save that these ranks make now, with torch of this process."""
    import torch

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = {"time": now, "ranks": ranks, "torch": str(torch.__version__), "vescale_ckpt": VERSION}
    return f"{save_id} {json.dumps(facts)}"


def unstamped(text: str) -> tuple[str, SavedBy | None]:
    """Returns the id alone, and the facts; None if the id has none, or what it has is not sound."""
    save_id, _, facts = text.partition(" ")
    try:
        found = SavedBy(**json.loads(facts))
        datetime.fromisoformat(found.time)
    except (TypeError, ValueError, RecursionError):
        return text, None
    kinds = (type(found.ranks), type(found.torch), type(found.vescale_ckpt))
    return (save_id, found) if kinds == (int, str, str) else (text, None)
