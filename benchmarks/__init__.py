"""Benchmarks: any checkpointing candidate against any other, alternated in one run.

Run from the repository root: ``python -m benchmarks --help``.
"""
