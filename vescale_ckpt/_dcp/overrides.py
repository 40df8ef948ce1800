"""Detects whether a subclass overrides a planner's method, for planners and storage writers."""

from __future__ import annotations


def is_method_of(planner: object, name: str, *kinds: type) -> bool:
    """Whether the method is that of one of `kinds`: neither the planner's class nor the object itself overrides it."""
    function = getattr(getattr(planner, name), "__func__", None)
    return any(function is getattr(kind, name) for kind in kinds)
