"""Runs one save or one load with all ranks of a process group, in the foreground or the background."""
