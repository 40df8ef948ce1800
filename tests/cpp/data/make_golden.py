"""Makes the golden records beside this file: what torch.save 2.13 writes. Run with the project's Python."""

from __future__ import annotations

import io
from pathlib import Path

import torch

tensor = (torch.arange(24) * 37 % 251).to(torch.uint8).view(torch.float32).reshape(2, 3)
for name, value in {"float32_2x3": tensor, "object": {"step": 7, "name": "a", "rates": [0.1, 0.01]}}.items():
    buffer = io.BytesIO()
    torch.save(value, buffer)
    Path(__file__).with_name(f"{name}.bin").write_bytes(buffer.getvalue())
