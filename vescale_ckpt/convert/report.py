"""What a conversion did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConvertReport:
    """Of all ranks together."""

    seconds: float
    tensors: int
    objects: int
    bytes: int  #: of tensors, as they were written
    files: int  #: that hold tensors
    left_out: list[str] = field(default_factory=list)  #: objects that the format has no place for
