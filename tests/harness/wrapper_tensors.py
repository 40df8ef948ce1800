"""A wrapper subclass for tests: rows of codes, each with a scale, as quantized weights and optimizer states are."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


class Quantized(torch.Tensor):
    """Codes of 8 bits and a scale a row, with values of another dtype. Copies of values lose bits; of itself none."""

    inner = ("codes", "scale")

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, sign: int = 1) -> Quantized:
        self: Quantized = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]
        self.codes, self.scale, self.sign = codes, scale, sign
        return self

    codes: torch.Tensor
    scale: torch.Tensor
    sign: int

    @classmethod
    def random(
        cls, rows: int, columns: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32, sign: int = 1
    ) -> Any:
        """Codes that no quantization of their values gives: a copy of values changes them."""
        source = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 100, (rows, columns), generator=source, dtype=torch.uint8)
        return cls(codes, torch.rand(rows, 1, generator=source) + 0.5, dtype, sign)

    @classmethod
    def zeros(cls, rows: int, columns: int = 8, dtype: torch.dtype = torch.float32, sign: int = 1) -> Any:
        return cls(torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, 1), dtype, sign)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.inner), (self.dtype, self.sign)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], *context)

    def values(self) -> torch.Tensor:
        return (self.codes.float() * self.scale * self.sign).to(self.dtype)

    def bits(self) -> tuple[bytes, bytes]:
        return tuple(getattr(self, name).contiguous().numpy().tobytes() for name in self.inner)  # type: ignore[return-value]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def _like(self, change: Any) -> Any:
        return type(self)(change(self.codes), change(self.scale), self.dtype, self.sign)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func is aten.copy_.default:
            return cls._copy(*args[:2])
        if func in (aten.detach.default, aten.alias.default, aten.view.default):
            return first._like(torch.Tensor.detach)
        if func is aten.clone.default:
            return first._like(torch.clone)
        if func is aten._to_copy.default:
            return first._like(lambda tensor: tensor.to(kwargs.get("device")))
        if func is aten.is_pinned.default:
            return False
        if func is aten.slice.Tensor:
            return cls._slice(*args)
        raise NotImplementedError(f"{cls.__name__}: {func}")

    @classmethod
    def _copy(cls, target: Any, source: Any) -> Any:
        if not isinstance(target, Quantized):
            return target.copy_(source.values())
        if isinstance(source, Quantized) and target.sign == source.sign:
            target.codes.copy_(source.codes)
            target.scale.copy_(source.scale)
            return target
        values = source.values() if isinstance(source, Quantized) else source
        scale = values.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 255
        target.scale.copy_(scale)
        target.codes.copy_((values.float() * target.sign / scale).round().clamp(0, 255))
        return target

    @classmethod
    def _slice(cls, tensor: Any, dim: int = 0, start: int = 0, end: int | None = None, step: int = 1) -> Any:
        if dim != 0 or step != 1:
            raise ValueError("only rows can be cut")
        return tensor._like(lambda inner: inner[start:end])


class Copying(Quantized):
    """Gives copies for parts, so that what is written to these is lost."""

    @classmethod
    def _slice(cls, *args: Any) -> Any:
        return super()._slice(*args)._like(torch.clone)


class OneScale(Quantized):
    """Has one scale for the whole tensor, which its parts share."""

    @classmethod
    def random(
        cls, rows: int, columns: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32, sign: int = 1
    ) -> Any:
        made = super().random(rows, columns, seed, dtype, sign)
        return cls(made.codes, made.scale[:1].clone(), dtype, sign)

    @classmethod
    def zeros(cls, rows: int, columns: int = 8, dtype: torch.dtype = torch.float32, sign: int = 1) -> Any:
        return cls(torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(1, 1), dtype, sign)

    @classmethod
    def _slice(cls, tensor: Any, dim: int = 0, start: int = 0, end: int | None = None, step: int = 1) -> Any:
        return cls(tensor.codes[start:end], tensor.scale, tensor.dtype, tensor.sign)


class Uncut(Quantized):
    """Cannot be cut, and has no values for a plain tensor."""

    @classmethod
    def _slice(cls, *args: Any) -> Any:
        raise NotImplementedError("slice")

    @classmethod
    def _copy(cls, target: Any, source: Any) -> Any:
        if not (isinstance(target, cls) and isinstance(source, cls)):
            raise AttributeError("'Tensor' object has no attribute 'codes'")
        return super()._copy(target, source)


class Unknown(Quantized):
    """Is not registered: torch does not load it with `weights_only=True`."""


torch.serialization.add_safe_globals([Quantized, Copying, OneScale, Uncut])
