"""Decides for a training when to save, which checkpoints to keep, and which one to resume from."""
