"""Reads, writes and commits checkpoints in DCP's layout on disk."""
