"""Fingerprints of states, and proofs that a resumed state is the one that was saved."""
