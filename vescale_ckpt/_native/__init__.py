"""DCP's layout on disk: names of its files, its metadata, and how a save commits."""
