"""Simulates planning a save without its job: how many bytes each rank would write, and what planning costs."""
