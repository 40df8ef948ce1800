"""Benchmarks of planning: who writes and reads what, beside stock DCP on the same items."""

from benchmarks.planning.cases import main

__all__ = ["main"]
