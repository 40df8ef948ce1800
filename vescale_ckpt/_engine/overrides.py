"""Tells whether a planner's method is one of known classes, or a user has overridden it."""

from __future__ import annotations


def is_method_of(planner: object, name: str, *kinds: type) -> bool:
    """Whether a planner does that as one of `kinds` does: overridden neither by its class nor on the object itself."""
    function = getattr(getattr(planner, name), "__func__", None)
    return any(function is getattr(kind, name) for kind in kinds)
