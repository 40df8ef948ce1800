"""Finds by names what is quantised in a checkpoint, and the `quantization_config` beside it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from .._engine.rows import CODES, ITEM_BYTES

BLOCKS, SCALES = "_blocks", "_scales"  #: ends of the names of MXFP4's tensors

# Names of the tensors with scales, behind that of the weight: DeepSeek and transformers; compressed-tensors, modelopt
# and llm-compressor; bitsandbytes.
_OF_WEIGHT = ("_scale_inv", "_scale", "_scales", "_scale_2", ".SCB", ".absmax")


def scales_of(key: str, dtype: str, present: Container[str]) -> str | None:
    """Returns the key of the scales of a stored tensor; None if it has none. Numbers of more than a byte have none.
    `dtype`: its name in torch."""
    code = CODES.get(dtype)
    if code is None or ITEM_BYTES[code] > 1 or dtype in ("bool", "float8_e8m0fnu"):
        return None
    names = [key + suffix for suffix in _OF_WEIGHT]
    if key.endswith(BLOCKS):
        names.append(key.removesuffix(BLOCKS) + SCALES)
    if (stem := key.removesuffix("weight")) != key:
        names += [stem + "SCB", stem + "scale"]
    return next((name for name in names if name in present), None)


def config_of(text: Any) -> str:
    """Returns `quantization_config` of a parsed `config.json` as JSON; empty if it has none."""
    for holder in _holders(text):
        if (found := holder.get("quantization_config")) is not None:
            return json.dumps(found, sort_keys=True)
    return ""


def config_for(content: bytes, kinds: Mapping[str, str]) -> bytes:
    """Returns a `config.json` without `quantization_config` if none of the weights has scales. `kinds`: the name of
    each weight's dtype. Raises ValueError if the content is no JSON."""
    if any(scales_of(name, dtype, kinds) for name, dtype in kinds.items()):
        return content
    text = json.loads(content)
    found = [holder for holder in _holders(text) if holder.pop("quantization_config", None) is not None]
    return json.dumps(text, indent=2, ensure_ascii=False).encode() if found else content


def _holders(text: Any) -> list[dict[str, Any]]:
    """Returns the parts of a parsed `config.json` that may have one."""
    parts = [text, text.get("text_config")] if isinstance(text, dict) else []
    return [part for part in parts if isinstance(part, dict)]
