"""Reads, writes and locks the files of checkpoints for all other packages; only the engine opens large files itself."""
