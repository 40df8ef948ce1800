"""Benchmarks: candidates alternated in one run, by the harness of `vescale_ckpt._bench`.

Run from the repository root: ``python -m benchmarks --help``.
"""
