"""Benchmarks of planning: who writes and reads what, beside stock DCP on the same items.

Run from the repository root: ``python -m benchmarks.planning --help``.
"""
