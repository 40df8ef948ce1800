"""Loads on several ranks: how fast, from how many bytes read, and when ranks should read for each other."""

from benchmarks.loading.tables import main

__all__ = ["main"]
