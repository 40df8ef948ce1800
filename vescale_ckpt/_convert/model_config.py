"""Makes a model's `config.json` fit the weights that a conversion writes beside it."""

from __future__ import annotations

import json

from .._checkpoint.quantized_names import holders_of_config, scales_of
from .plan import Plan


def fitting(content: bytes, planned: Plan) -> bytes:
    """Returns `config.json` without `quantization_config` if the weights are plain values. Raises ValueError if it is
    no JSON."""
    kinds = {output.name: str(output.dtype).removeprefix("torch.") for output in planned.outputs}
    if any(scales_of(name, dtype, kinds) for name, dtype in kinds.items()):
        return content
    text = json.loads(content)
    found = [holder for holder in holders_of_config(text) if holder.pop("quantization_config", None) is not None]
    return json.dumps(text, indent=2, ensure_ascii=False).encode() if found else content
