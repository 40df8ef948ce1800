"""Makes the golden records beside this file: what torch.save 2.13 writes. Run with the project's Python."""

from __future__ import annotations

import io
from pathlib import Path

import torch

HERE = Path(__file__).parent


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def values(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    count = torch.Size(sizes).numel() * dtype.itemsize
    raw = (torch.arange(count) * 37 % 251).to(torch.uint8)
    return (raw.remainder(2) if dtype == torch.bool else raw).view(dtype).reshape(sizes)


class Ends(io.RawIOBase):
    """Keeps the first and last bytes of what is written."""

    def __init__(self, keep: int) -> None:
        self.keep, self.size, self.head, self.tail = keep, 0, b"", b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        self.head += bytes(view[: max(0, self.keep - len(self.head))])
        self.tail = (self.tail + bytes(view[-self.keep :]))[-self.keep :]
        self.size += len(view)
        return len(view)


tensors = {
    "float32_2x3": values(torch.float32, 2, 3),
    "bfloat16_5": values(torch.bfloat16, 5),
    "bool_scalar": values(torch.bool),
    "int64_0x4": torch.empty(0, 4, dtype=torch.int64),
    "int8_2x1x300x2": values(torch.int8, 2, 1, 300, 2),
    "float8_e4m3fn_7": values(torch.float8_e4m3fn, 7),
    "uint16_3x3": values(torch.uint16, 3, 3),
    "complex128_2": values(torch.complex128, 2),
    "transposed_float32_3x2": values(torch.float32, 2, 3).T,
    "conjugated_complex64_2": values(torch.complex64, 2).conj(),
}
for name, tensor in tensors.items():
    (HERE / f"{name}.bin").write_bytes(saved(tensor))
(HERE / "object.bin").write_bytes(saved({"step": 7, "name": "a", "rates": [0.1, 0.01]}))

# Large bodies of zeros, around 4 GiB among them: their framing alone.
counts = {"zeros_70000": 70000, "zeros_below_4gib": 2**32 - 2, "zeros_4gib": 2**32 - 1, "zeros_over_4gib": 2**32 + 5}
for name, count in counts.items():
    ends = Ends(keep=2048)
    torch.save(torch.zeros(count, dtype=torch.uint8), ends)
    epilogue = ends.size - 704 - count
    (HERE / f"{name}.bin").write_bytes(ends.head[:704] + ends.tail[-epilogue:])
