"""Benchmarks: candidates alternated in one run, by `benchmarks.harness`.

Run from the repository root: ``python -m benchmarks --help``.
"""
